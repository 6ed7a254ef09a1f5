"""What a verb does first: bad usage is told before torch is imported, a bug is not bad usage."""

import json
import os
import subprocess
import sys

import pytest

from ssmax.errors import UsageError
from ssmax_lab import cli
from ssmax_lab.study import jobs
from ssmax_lab.study.presets import quick


def test_generation_imports_nothing_of_torch_compile(tmp_path):
    code = (
        "import sys; from ssmax_lab import cli; "
        "cli.run(['generate', 'tiny-b', 'a', '--max-new-tokens', '1', '--device', 'cpu']); "
        "print(*('torch._dynamo' in sys.modules, 'torch.distributed.checkpoint' in sys.modules))"
    )
    # Triton's interpreter, which tests run with, imports more.
    plain = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=plain
    ).stdout
    assert out.splitlines()[-1] == "False False"


@pytest.mark.parametrize(
    ("error", "code"), [(UsageError("give another"), 2), (ValueError("a bug"), None)]
)
def test_a_job_tells_bad_usage_in_one_line_and_a_bug_with_its_traceback(
    monkeypatch, capsys, error, code, tmp_path
):
    def raises(*_, **__):
        raise error

    (tmp_path / "study.json").write_text(json.dumps({"study": quick().to_dict()}))
    monkeypatch.setattr(sys, "platform", "elsewhere")
    monkeypatch.setattr(jobs, "run_job", raises)
    monkeypatch.setattr(sys, "argv", ["jobs", str(tmp_path), "data", "--data", "x"])
    if code is None:
        with pytest.raises(ValueError, match="a bug"):
            jobs.main()
    else:
        assert jobs.main() == code
        assert capsys.readouterr().out == f"{error}\n"


@pytest.mark.parametrize("verb", ["generate {} hello", "export {} out", "report {}"])
def test_a_folder_that_is_not_there_is_called_so(tmp_path, monkeypatch, capsys, verb):
    monkeypatch.chdir(tmp_path)
    assert cli.run(verb.format("runs/nowhere").split()) == 2
    assert "there is no folder runs/nowhere" in capsys.readouterr().err
