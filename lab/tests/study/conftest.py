"""A study so small that it takes seconds, and its text."""

import dataclasses

import pytest

from ssmax_lab.data.preparation import prepare
from ssmax_lab.study.presets import quick


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"{number} bottles of beer on the wall. " * 60)
    return folder


@pytest.fixture(scope="session")
def tokens(text):
    """The text prepared once, for studies that need not show that they do it themselves."""
    out = text.parent / "tokens"
    prepare(str(text), out, tokenizer="bytes", workers=1, validation_fraction=0.2)
    return out


@pytest.fixture
def undrawn(monkeypatch):
    """Studies whose page is not looked at are not drawn, which takes seconds."""

    def draw(findings, folder):
        (folder / "report.html").touch()
        return folder / "report.html"

    monkeypatch.setattr("ssmax_lab.study.reproduction.draw", draw)


@pytest.fixture
def tiny(text):
    study = quick()
    pretraining = study.pretraining.with_overrides(
        {
            "model.num_layers": 1, "model.num_heads": 2, "model.hidden_size": 16,
            "model.intermediate_size": 16, "model.train_length": 128, "model.vocab_size": 257,
            "run.steps": 12, "run.batch_size": 2, "run.micro_batch": 2, "run.scale_every": 4,
            "run.checkpoint_every": 4, "run.validate_every": 50, "schedule.warmup_steps": 1,
            "data.validation_windows": 0, "data.needle_length": 0, "schedule.kind": "constant",
            "schedule.decay_steps": 0,
        }
    )  # fmt: skip
    return dataclasses.replace(
        study,
        pretraining=pretraining,
        source=str(text),
        tokenizer="bytes",
        questions="invented",
        finetuning={"run.steps": 2, "schedule.warmup_steps": 1, "data.validation_windows": 0},
        loss_length=256,
        loss_documents=2,
        needle_lengths=(128, 160),
        needle_depths=2,
        needle_trials=2,
        digits=4,
        score_length=130,
        score_trials=2,
        papers_needle_trials=2,
        sharpness_documents=1,
    )
