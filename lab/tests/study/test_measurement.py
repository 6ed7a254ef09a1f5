"""What is measured is the model, the text and the rule that were asked for."""

import shutil
import subprocess
import sys

import pytest
import torch

from ssmax_lab.data.preparation import prepare
from ssmax_lab.records import Sharpness, read_jsonl
from ssmax_lab.study.measurement import Measurement
from ssmax_lab.train.dist import single_process
from ssmax_lab.train.pretraining import pretrain


@pytest.fixture
def trained(tiny, tokens, tmp_path):
    """Trains a run of some steps, in the same folder every time."""

    def train(steps):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        changes = {"data.folder": str(tokens), "run.steps": steps, "model.rule": "ssmax"}
        config = tiny.pretraining.with_overrides(changes)
        pretrain(config, tmp_path / "run", ranks=single_process(torch.device("cpu")))
        return tmp_path / "run"

    return train


def measurement(run, tmp_path, **options):
    options = {"data": None, "theta": None, "rule": None, "device": "cpu", **options}
    return Measurement.of_run(run, results=tmp_path / "results", **options)


def test_other_weights_are_another_model_whatever_they_are_called(trained, tmp_path):
    before = measurement(trained(2), tmp_path)
    grid = {"lengths": [128], "depths": [0.5], "trials": 2, "digits": 4, "batch": 2, "seed": 0}
    first = before.needle(**grid)
    # Trained once more to the same step, it is the same model, and nothing is measured again.
    again = measurement(trained(2), tmp_path)
    assert again.model_hash == before.model_hash
    assert again.needle(**grid) == first
    run = trained(4)
    with pytest.raises(ValueError, match="numbers of another model that is called 'run'"):
        measurement(run, tmp_path)


def test_tokens_of_another_tokenizer_are_refused(trained, text, tmp_path):
    prepare(str(text), tmp_path / "small", tokenizer="small", workers=1, validation_fraction=0.2)
    with pytest.raises(ValueError, match="not of the model; .* --tokenizer bytes$"):
        measurement(trained(2), tmp_path, data=tmp_path / "small")


def test_damaged_text_is_refused(trained, tokens, tmp_path):
    run = trained(2)
    shutil.copytree(tokens, tmp_path / "damaged")
    shard = next((tmp_path / "damaged" / "validation").glob("*.shard"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        measurement(run, tmp_path, data=tmp_path / "damaged")


def test_a_models_own_rule_keeps_what_it_has_learned(trained, tmp_path):
    run = trained(6)
    asked, plain = (measurement(run, tmp_path, rule=rule) for rule in ("ssmax", None))
    assert asked.run == plain.run == "run"
    scale = plain.model.blocks[0].attention.ssmax.s
    assert asked.model.blocks[0].attention.ssmax.s.tolist() == scale.tolist()
    other = measurement(run, tmp_path, rule="softmax")
    assert other.run == "run+softmax" and other.model_hash == plain.model_hash


def test_a_run_is_called_as_the_link_by_which_it_is_given(trained, tmp_path):
    (tmp_path / "best").symlink_to(trained(2))
    assert measurement(tmp_path / "best", tmp_path).run == "best"


def test_another_rule_has_the_s_that_is_asked_for(trained, tmp_path):
    run = trained(6)

    def scales(**options):
        measured = measurement(run, tmp_path, **options)
        return measured.run, [
            x for block in measured.model.blocks for x in block.attention.ssmax.s.tolist()
        ]

    name, learned = scales()
    assert len(set(learned)) == len(learned)
    assert scales(rule="ssmax_held", s="kept") == (f"{name}+ssmax_held", learned)
    assert scales(rule="temperature", s=1.25) == (f"{name}+temperature=1.25", [1.25] * len(learned))
    assert set(scales(rule="temperature")[1]) == {1.0}


def test_a_folder_that_cannot_be_made_is_noticed_before_anything_is_measured(trained, tmp_path):
    (tmp_path / "results").write_text("a file")
    with pytest.raises(ValueError, match="results must be a folder"):
        measurement(trained(2), tmp_path)


def test_processes_that_measure_into_one_folder_lose_nothing(trained, tmp_path):
    run = trained(2)
    script = f"""
from pathlib import Path
from ssmax_lab.study.measurement import Measurement
import sys
for i in range(8):
    Measurement.of_run(Path({str(run)!r}), data=None, theta=float(sys.argv[1]) + i, rule=None,
        results=Path({str(tmp_path / "results")!r}), device="cpu").sharpness(length=20, documents=1)
"""
    commands = [[sys.executable, "-c", script, theta] for theta in ("1000", "2000")]
    for one in [subprocess.Popen(command) for command in commands]:
        assert one.wait() == 0
    records = read_jsonl(tmp_path / "results" / "sharpness.jsonl", Sharpness)
    assert len({record.run for record in records}) == len(records) == 16
