"""`ssmax doctor`: what this machine has for the work, and what each part lacks."""

import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from ssmax._extras import how_to
from ssmax.cli.options import Json

ENOUGH_GIB = 5.0
"""Of disk: what a study of the quick preset writes, with room to spare."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: str
    """fine, missing (something works less well or not at all without it), or broken."""
    found: str
    advice: str = ""


def doctor(json_: Json = False) -> int:
    """Look at what this machine has for the work, and what it lacks."""
    checks = list(examine())
    if json_:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    else:
        for check in checks:
            print(f"{check.state:8}{check.name:24}{check.found}")
            if check.advice:
                print(f"{'':32}{check.advice}")
    return 1 if any(check.state == "broken" for check in checks) else 0


def examine() -> Iterator[Check]:
    """Run every check; one that fails is a finding, not an error."""
    for look in (_python, _torch, _device, _kernels, _compiler, _extras, _disk):
        try:
            yield from look()
        except Exception as error:  # a broken part must not hide the others
            name = look.__name__.strip("_")
            yield Check(name=name, state="broken", found=f"{type(error).__name__}: {error}")


def _python() -> Iterator[Check]:
    yield Check(
        name="python",
        state="fine",
        found=f"{platform.python_version()}, {sys.platform} {platform.machine()}",
    )
    version = importlib.metadata.version("ssmax")
    yield Check(name="ssmax", state="fine", found=version)


def _torch() -> Iterator[Check]:
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    yield Check(name="torch", state="fine", found=f"{torch.__version__}, {cuda}")


def _device() -> Iterator[Check]:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = f"{usable} of {os.cpu_count()} for this process"
    yield Check(name="cores", state="fine", found=found)
    if not torch.cuda.is_available():
        advice = "the quick preset needs none; small, gpu and paper do"
        yield Check(name="gpu", state="missing", found="none that torch can use", advice=advice)
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found = f"{about.name}, {about.total_memory / 2**30:.0f} GiB"
        yield Check(name=f"gpu {index}", state="fine", found=found)


def _kernels() -> Iterator[Check]:
    import torch

    if importlib.util.find_spec("triton") is None:
        yield Check(
            name="triton",
            state="missing",
            found="not installed: the fused kernels have their reference implementations instead",
            advice=how_to("ssmax[triton]"),
        )
        return
    version = importlib.metadata.version("triton")
    if not torch.cuda.is_available():
        found = f"{version}; its kernels need a GPU, the reference implementations run here"
        yield Check(name="triton", state="fine", found=found)
        return
    from ssmax import rope_scale, rope_tables

    q, k = (torch.randn(2, heads, 37, 64, device="cuda") for heads in (4, 2))
    tables = rope_tables(torch.arange(37, device="cuda"), 64)
    factor = torch.rand(4, 37, device="cuda")
    fused, plain = (rope_scale(q, k, *tables, factor, impl=i)[0] for i in ("triton", "reference"))
    error = (fused - plain).abs().max().item()
    state = "fine" if error < 1e-5 else "broken"
    found = f"{version}; rope_scale agrees with its twin to {error:.0e}"
    yield Check(name="triton", state=state, found=found)


def _compiler() -> Iterator[Check]:
    words = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    # As "ccache g++ -O2": the compiler stands behind its wrappers and before its options.
    programs = itertools.takewhile(lambda word: not word.startswith("-"), words)
    path = next(filter(None, map(shutil.which, reversed(list(programs)))), None)
    if path is None:
        found = "no C++ compiler: torch.compile cannot make code for the CPU"
        yield Check(name="compiler", state="missing", found=found, advice="install g++ or clang++")
    else:
        yield Check(name="compiler", state="fine", found=path)


def _extras() -> Iterator[Check]:
    for package in ("ssmax", "ssmax-lab"):
        if not _is_installed(package):
            yield Check(
                name=package, state="missing", found="not installed", advice=how_to(package)
            )
            continue
        about = importlib.metadata.metadata(package)
        requirements = importlib.metadata.requires(package) or []
        for extra in about.get_all("Provides-Extra") or []:
            names = [
                re.split(r"[\s;<>=!~\[(]", requirement, maxsplit=1)[0]
                for requirement in requirements
                if re.search(rf"extra == ['\"]{extra}['\"]", requirement)
            ]
            missing = [name for name in names if not _is_installed(name)]
            state, found = (
                ("missing", f"lacks {', '.join(missing)}") if missing else ("fine", "all there")
            )
            what = f"{package}[{extra}]"
            yield Check(name=what, state=state, found=found, advice=how_to(what) if missing else "")


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _disk() -> Iterator[Check]:
    here = Path.cwd()
    free = shutil.disk_usage(here).free / 2**30
    if not os.access(here, os.W_OK):
        yield Check(
            name="disk", state="broken", found=f"{here} cannot be written", advice="go elsewhere"
        )
        return
    is_enough = free >= ENOUGH_GIB
    yield Check(
        name="disk",
        state="fine" if is_enough else "missing",
        found=f"{free:.1f} GiB free here",
        advice="" if is_enough else f"a quick study wants {ENOUGH_GIB:g} GiB",
    )
