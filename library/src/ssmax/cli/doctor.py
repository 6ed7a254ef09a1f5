"""`ssmax doctor`: what works on this machine, what was never tested on it, and what is missing."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
from collections.abc import Iterator

from ssmax._extras import how_to
from ssmax.cli.options import Json

TESTED = {"python": ((3, 11), (3, 12)), "torch": ((2, 11), (2, 13)), "triton": ((3, 6), (3, 9))}
"""The oldest and the newest release that the tests ran with; docs/versions.md tells where.
Transformers' stand in `ssmax.hf`, which refuses older ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: str
    """fine, untested (nobody ran the tests with it), missing (something works less well or not at
    all without it), or broken."""
    found: str
    advice: str = ""


def doctor(json_: Json = False) -> int:
    """Show what this machine has, and what it lacks."""
    checks = list(examine())
    if json_:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    else:
        for check in checks:
            print(f"{check.state:10}{check.name:24}{check.found}")
            if check.advice:
                print(f"{'':34}{check.advice}")
    return 1 if any(check.state == "broken" for check in checks) else 0


def examine() -> Iterator[Check]:
    """Run every check; one that fails is a finding, not an error."""
    for look in (_python, _torch, _device, _kernels, _transformers, _compiler, _extras):
        try:
            yield from look()
        except Exception as error:  # a broken part must not hide the others
            yield Check(look.__name__.strip("_"), "broken", f"{type(error).__name__}: {error}")


def _python() -> Iterator[Check]:
    version, system = platform.python_version(), platform.system()
    yield _versioned("python", version, f"{version}, {platform.machine()}")
    state = "fine" if system == "Linux" else "untested"
    yield Check("system", state, system, "" if state == "fine" else "the tests ran on Linux alone")
    yield Check("ssmax", "fine", importlib.metadata.version("ssmax"))


def _torch() -> Iterator[Check]:
    import torch

    hip, cuda = torch.version.hip, torch.version.cuda
    build = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "without CUDA"
    yield _versioned("torch", torch.__version__, f"{torch.__version__}, {build}")


def _device() -> Iterator[Check]:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("cores", "fine", f"{usable} of {os.cpu_count()} for this process")
    if torch.backends.mps.is_available():
        found = "Apple's, by MPS: the commands and the Triton kernels do not use it"
        advice = "in Python tensors and models on 'mps' go through torch's own attention"
        yield Check("gpu", "untested", found, advice)
    elif not torch.cuda.is_available():
        advice = "everything runs on the CPU; the presets small, gpu and paper are made for a GPU"
        yield Check("gpu", "missing", "none that torch can use", advice)
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found = f"{about.name}, {about.total_memory / 2**30:.0f} GiB"
        if torch.version.hip is None:
            yield Check(f"gpu {index}", "fine", found)
        else:
            advice = "the kernels ran on NVIDIA alone; backend='math' is torch's own operators"
            yield Check(f"gpu {index}", "untested", found, advice)


def _kernels() -> Iterator[Check]:
    import torch

    # By its module: builds for ROCm have another name.
    if importlib.util.find_spec("triton") is None:
        on_linux = platform.system() == "Linux"
        advice = how_to("ssmax[triton]") if on_linux else "there is none for this system"
        yield Check("triton", "missing", "the reference implementations run instead", advice)
        return
    import triton

    version = triton.__version__
    if not torch.cuda.is_available():
        yield _versioned("triton", version, f"{version}; its kernels need a GPU")
        return
    from ssmax import rope_scale, rope_tables

    q, k = (torch.randn(2, heads, 37, 64, device="cuda") for heads in (4, 2))
    tables = rope_tables(torch.arange(37, device="cuda"), 64)
    factor = torch.rand(4, 37, device="cuda")
    fused, plain = (rope_scale(q, k, *tables, factor, impl=i)[0] for i in ("triton", "reference"))
    error = (fused - plain).abs().max().item()
    found = f"{version}; rope_scale agrees with its reference to {error:.0e}"
    check = _versioned("triton", version, found)
    yield check if error < 1e-5 else dataclasses.replace(check, state="broken")


def _transformers() -> Iterator[Check]:
    # Where it is not installed, the extras say so.
    if _is_installed("transformers"):
        from ssmax.hf.hook import NEWEST, OLDEST

        version = importlib.metadata.version("transformers")
        yield _versioned("transformers", version, version, (OLDEST, NEWEST))


def _versioned(
    name: str, version: str, found: str, tested: tuple[tuple[int, int], ...] | None = None
) -> Check:
    """A release between those that were tested is fine, a later one untested, an older broken."""
    oldest, newest = tested or TESTED[name]
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < oldest:
        return Check(name, "broken", found, f"ssmax needs {oldest[0]}.{oldest[1]} or later")
    if numbers > newest:
        advice = f"the tests ran with {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
        return Check(name, "untested", found, advice)
    return Check(name, "fine", found)


def _compiler() -> Iterator[Check]:
    words = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if path := shutil.which(words[0]):
        yield Check("compiler", "fine", path)
    else:
        found = "no C++ compiler: torch.compile cannot make code for the CPU"
        yield Check("compiler", "missing", found, "install g++ or clang++")


def _extras() -> Iterator[Check]:
    for package in ("ssmax", "ssmax-lab"):
        if not _is_installed(package):
            yield Check(package, "missing", "not installed", how_to(package))
            continue
        about = importlib.metadata.metadata(package)
        for extra in about.get_all("Provides-Extra") or []:
            names = [
                re.split(r"[\s;<>=!~\[(]", requirement, maxsplit=1)[0]
                for requirement in importlib.metadata.requires(package) or []
                if re.search(rf"extra == ['\"]{extra}['\"]", requirement)
            ]
            what = f"{package}[{extra}]"
            if missing := [name for name in names if not _is_installed(name)]:
                yield Check(what, "missing", f"lacks {', '.join(missing)}", how_to(what))
            else:
                yield Check(what, "fine", "all there")


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
