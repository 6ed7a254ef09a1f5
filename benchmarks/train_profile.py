"""Where does a training step's time go, and what does SSMax add to softmax's?

    python benchmarks/train_profile.py      # the paper's model on a GPU, a minute

Both train in one process, as in `train_speed.py --pairs`, first timed without the profiler, then
watched by it: milliseconds of every kind of kernel in a step, how many of them, and the sum of all
against the time of a step. The rest are gaps. Rows are appended to benchmarks/results.csv, a kind
of kernel each.
"""

import argparse
import collections
import contextlib
import json
import re
import statistics
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ssmax_lab.model import LMConfig
from ssmax_lab.records import BenchmarkRow, Provenance, append_csv
from train_speed import PAIRS, RESULTS, SEED, trainer_of, with_rule

STEPS, BATCH = 5, 64
KINDS = {
    "attention": r"fmha|flash|sdpa|cudnn",
    "products": r"gemm|nvjet|cutlass|cublas|splitK",
    "rotation and factor": r"_turn_kernel",
    "loss": r"_loss_kernel",
    "optimizer and clipping": r"multi_tensor|adam|foreach|lpnorm",
    "copies and clearing": r"memset|memcpy|fill|copy_kernel",
    "norms": r"triton_(red|per)",
    "elementwise, compiled": r"triton_poi",
}
"""The first that matches counts."""


def kind_of(kernel: str) -> str:
    found = (kind for kind, names in KINDS.items() if re.search(names, kernel, re.IGNORECASE))
    return next(found, "other")


def watched(some_steps, count: int) -> dict[str, tuple[float, int]]:
    """Milliseconds and launches of so many steps, by the kernel's name."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        some_steps(count)
    kernels: dict[str, tuple[float, int]] = collections.defaultdict(lambda: (0.0, 0))
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            taken, launches = kernels[event.name]
            kernels[event.name] = taken + event.time_range.elapsed_us() / 1e3, launches + 1
    return dict(kernels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="the table to append to")
    parser.add_argument(
        "--kernels", help="a file for every kernel's name, time and number, as JSON"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    shape = LMConfig()
    provenance = Provenance.here(
        config={"model": shape.to_dict(), "batch": BATCH, "steps": STEPS},
        device=torch.cuda.get_device_name(),
        seed=SEED,
    )
    every = {}
    for pair in PAIRS:
        sums: dict[str, dict[str, tuple[float, int]]] = {}
        with contextlib.ExitStack() as stack:
            for name in pair:
                run = stack.enter_context(trainer_of(name, with_rule(shape, name), BATCH))
                run(10)
                step = statistics.median(run(STEPS)[0] for _ in range(4))
                every[name] = {
                    kernel: (taken / STEPS, launches // STEPS)
                    for kernel, (taken, launches) in watched(run, STEPS).items()
                }
                kinds: dict[str, tuple[float, int]] = collections.defaultdict(lambda: (0.0, 0))
                for kernel, (taken, count) in every[name].items():
                    so_far, launches = kinds[kind_of(kernel)]
                    kinds[kind_of(kernel)] = so_far + taken, launches + count
                total = sum(taken for taken, _ in kinds.values())
                kinds["all kernels"] = total, sum(count for _, count in kinds.values())
                kinds["gaps"], kinds["a step"] = (step - total, 0), (step, 0)
                sums[name] = kinds
        print(f"{'':24}" + "".join(f"{name:>28}" for name in pair))
        for kind in dict.fromkeys(kind for kinds in sums.values() for kind in kinds):
            cells = (sums[name].get(kind, (0.0, 0)) for name in pair)
            print(f"{kind:24}" + "".join(f"{ms:18.3f} ms {count:5d}" for ms, count in cells))
        append_csv(
            arguments.out,
            [
                BenchmarkRow(
                    benchmark="train_profile",
                    competitor=name,
                    shape=f"{shape.num_layers}x{shape.hidden_size} B{BATCH} T{shape.train_length}",
                    mode=kind,
                    milliseconds=round(taken, 3),
                    ratio=round(taken / sums[pair[0]][kind][0], 4),
                    peak_mib=0.0,
                    memory_ratio=0.0,
                    error=0.0,
                    provenance=provenance,
                )
                for name, kinds in sums.items()
                for kind, (taken, _) in kinds.items()
            ],
        )
    if arguments.kernels:
        Path(arguments.kernels).write_text(json.dumps(every, indent=1))


if __name__ == "__main__":
    main()
