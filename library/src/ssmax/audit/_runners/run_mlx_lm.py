"""Run a model by mlx-lm."""

from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
import rows
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model


def main() -> None:
    """Run the job."""
    job = rows.read_job()
    model = load_model(Path(job["folder"]))[0]
    cache, found = make_prompt_cache(model), []
    for piece in rows.pieces(job["tokens"][:-1]):
        logits = model(mx.array([piece]), cache=cache)[0].astype(mx.float32)
        found += rows.likeliest(np.array(logits))
    rows.write(version("mlx-lm"), found)


if __name__ == "__main__":
    main()
