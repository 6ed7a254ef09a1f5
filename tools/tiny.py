"""Train the runs in src/ssmax/tiny anew: make tiny. Two CPU cores take about five minutes.

What depends on where it ran is left out: the text is named as every machine names it, and the
tokenizer is the package's own.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from ssmax_lab.data.sources import embedded_version
from ssmax_lab.records import config_hash
from ssmax_lab.tiny import NAMES, RUNS
from ssmax_lab.train.run import read_run_config

TEXT, TOKENIZER = "data/embedded-small", "small"


def command(name: str) -> list[str]:
    """What makes a run, in a folder where nothing else is."""
    letter, *is_tuned = name.removeprefix("tiny-").split("-")
    if is_tuned:
        return ["finetune", f"runs/tiny-{letter}"]
    return ["pretrain", "--preset", "quick", "--config", letter, "--out", f"runs/{name}"]


def keep(run: Path, kept: Path) -> None:
    """The run without what belongs to this machine; its hash is that of what is kept."""
    config = read_run_config(run)
    base = Path(config.data.base).name if config.data.base else ""
    text = "" if base else TEXT
    config = config.with_overrides(
        {"data.folder": text, "data.base": base, "data.tokenizer": TOKENIZER}
    ).to_dict()
    provenance = json.loads((run / "config.json").read_text())["provenance"]
    provenance["config_hash"] = config_hash(config)
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(run / "model", kept / "model")
    shutil.copy(run / "metrics.jsonl", kept)
    (kept / "config.json").write_text(
        json.dumps({**config, "provenance": provenance}, indent=2) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="to train in; runs that are there are taken")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for name in NAMES:
        run = folder / "runs" / name
        if not (run / "model").is_dir():
            subprocess.run(
                [sys.executable, "-m", "ssmax_lab", *command(name)], cwd=folder, check=True
            )
        keep(run, RUNS / name)
        weights = (RUNS / name / "model" / "model.safetensors").read_bytes()
        made[name] = {
            "command": " ".join(["ssmax", *command(name)]),
            "sha256": hashlib.sha256(weights).hexdigest(),
        }
    about = {"text": f"embedded {embedded_version()}", "runs": made}
    (RUNS / "runs.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
