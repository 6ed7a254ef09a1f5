"""The doctor: what runs here is looked at, other machines are simulated and named so."""

import json
import types

import pytest
import torch

from ssmax import cli, rope_tables
from ssmax.cli import doctor


def states(look):
    return {check.name: check.state for check in look()}


def test_the_doctor_looks_at_everything(capsys):
    assert cli.run(["doctor"]) == 0
    assert "torch" in capsys.readouterr().out
    assert cli.run(["doctor", "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    named = {"python", "system", "torch", "triton", "transformers", "ssmax[hf]"}
    assert named <= set(checks)
    assert checks["torch"]["state"] == "fine"


def test_a_part_that_is_broken_does_not_hide_the_others(monkeypatch, capsys):
    def _kernels():
        raise RuntimeError("no kernel image")
        yield

    monkeypatch.setattr(doctor, "_kernels", _kernels)
    assert cli.run(["doctor"]) == 1
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert ["broken", "kernels", "RuntimeError: no kernel image"] in lines
    assert "compiler" in {line[1] for line in lines}


@pytest.mark.parametrize(
    ("set_to", "found"),
    [
        (None, "c++"),
        ("  ", "c++"),
        ("g++ -O2 -I wrapper", "g++"),
        ("nowhere -O2", None),
    ],
)
def test_the_doctor_finds_the_compiler_among_the_words_of_cxx(tmp_path, monkeypatch, set_to, found):
    for name in ("c++", "g++"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if set_to is not None:
        monkeypatch.setenv("CXX", set_to)
    (check,) = doctor._compiler()
    assert check.state == ("fine" if found else "missing")
    assert not found or check.found == str(tmp_path / found)


def test_what_an_extra_lacks_is_named_with_the_command_that_brings_it(monkeypatch):
    from ssmax._extras import how_to, require

    with pytest.raises(ImportError) as raised:
        require("no_such_package", install="ssmax[export]", purpose="ssmax export")
    assert str(raised.value).endswith(how_to("ssmax[export]"))
    assert "pip install 'ssmax[export]'" in how_to("ssmax[export]")
    monkeypatch.setattr(doctor, "_is_installed", lambda name: name not in ("gguf", "ssmax-lab"))
    checks = {check.name: check for check in doctor._extras()}
    assert checks["ssmax[export]"].found == "lacks gguf"
    assert checks["ssmax[export]"].advice == how_to("ssmax[export]")
    assert checks["ssmax-lab"].state == "missing" and checks["ssmax[hf]"].state == "fine"


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_simulated_a_system_that_the_tests_never_ran_on_is_untested(system, monkeypatch):
    monkeypatch.setattr("platform.system", lambda: system)
    assert states(doctor._python)["system"] == "untested"


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.10.1", "broken"), ("2.11.0+cu130", "fine"), ("2.13.0", "fine"), ("2.14.0a0", "untested")],
)
def test_simulated_versions_beyond_the_tested_are_told_from_those_that_fail(
    version, state, monkeypatch
):
    monkeypatch.setattr("torch.__version__", version)
    assert states(doctor._torch) == {"torch": state}


@pytest.mark.parametrize(("version", "state"), [("4.57.6", "broken"), ("5.99.0", "untested")])
def test_simulated_transformers(version, state, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert states(doctor._transformers) == {"transformers": state}


def test_simulated_mps_is_told_and_not_promised(monkeypatch):
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    (check,) = [check for check in doctor._device() if check.name == "gpu"]
    assert check.state == "untested" and "MPS" in check.found


def test_simulated_mps_rotary_tables_need_no_float64():
    with torch._subclasses.FakeTensorMode():
        cos, sin = rope_tables(torch.arange(9, device="mps"), 16)
    assert cos.dtype == sin.dtype == torch.float32


@pytest.mark.parametrize(("hip", "state"), [(None, "fine"), ("6.4", "untested")])
def test_simulated_rocm_is_told_from_cuda(hip, state, monkeypatch):
    about = types.SimpleNamespace(name="a GPU", total_memory=2**34)
    monkeypatch.setattr("torch.version.hip", hip)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: about)
    assert states(doctor._device)["gpu 0"] == state
    (check,) = doctor._torch()
    assert ("ROCm" in check.found) == (hip is not None)


@pytest.mark.parametrize("system", ["Linux", "Darwin"])
def test_simulated_without_triton_the_reference_implementations_run(system, monkeypatch):
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (check,) = doctor._kernels()
    assert check.state == "missing" and ("pip install" in check.advice) == (system == "Linux")
