"""JAX on the CPU, as four devices: arrays are sharded there as on four accelerators."""

import importlib.util
import os

if importlib.util.find_spec("jax") is not None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    jax.config.update("jax_num_cpu_devices", 4)
