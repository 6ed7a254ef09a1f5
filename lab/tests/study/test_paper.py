"""The paper preset, rehearsed from its first step to its page."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ssmax_lab.analysis.findings import read_findings
from ssmax_lab.records import METRICS, read_metrics

SCRIPT = Path(__file__).parent / "paper_rehearsal.py"


def rehearse(folder, tokens, ranks):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), str(tokens), str(ranks)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_the_paper_preset_is_rehearsed_on_two_ranks_and_resumes_on_one(tokens, tmp_path):
    study = tmp_path / "paper"
    metrics = study / "runs" / "b-0" / METRICS
    first = rehearse(study, tokens, 2)
    try:
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 500:
            assert first.poll() is None, first.communicate()[0]
            time.sleep(0.1)
    finally:
        first.send_signal(signal.SIGINT)
        said = first.communicate(timeout=120)[0]
    assert "signal" in said and first.returncode == 1, said
    stopped_at = read_metrics(metrics, "step")[-1]["step"]
    assert 400 <= stopped_at < 2000

    second = rehearse(study, tokens, 1)
    said = second.communicate(timeout=1500)[0]
    assert second.returncode == 0, said
    assert [line["step"] for line in read_metrics(metrics, "step")] == list(range(1, 2001))
    starts = [
        json.loads(line)
        for line in (metrics.parent / "events.jsonl").read_text().splitlines()
        if '"start"' in line
    ]
    assert [(one["ranks"], one["step"] > 0) for one in starts] == [(2, False), (1, True)]
    found = read_findings(study)
    for kind in (found.curves, found.position_losses, found.same_theta_losses, found.sharpness,
                 found.trials, found.scores, found.papers_needle):  # fmt: skip
        assert set(kind) == {"b"}
    assert (study / "report.html").is_file()
    # It has learned the 10 words of the text.
    curve = found.curves["b"]
    losses = next(iter(curve.values()))[1]
    assert losses[-1] < 0.5 * losses[0]
