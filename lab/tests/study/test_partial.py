"""A study made in parts: stopped by the clock, resumed, packed without weights, merged."""

import dataclasses
import io
import json
import math
import random
import re
import shutil
import tarfile
from pathlib import Path

import pytest

from ssmax_lab import cli
from ssmax_lab.analysis.findings import Replica, read_findings
from ssmax_lab.cli.study import OUT_OF_TIME
from ssmax_lab.configurations import CONFIGURATIONS
from ssmax_lab.data.preparation import prepare
from ssmax_lab.records import PositionLoss, read_jsonl
from ssmax_lab.study import scheduler
from ssmax_lab.study.partial import merge, pack
from ssmax_lab.study.plan import makespan, plan
from ssmax_lab.study.presets import VARIANTS, gpu, study_named
from ssmax_lab.study.reproduction import report, reproduce


def test_pieces_are_made_packed_gathered_and_judged(
    tiny, tokens, tmp_path, tmp_path_factory, capfd
):
    study = dataclasses.replace(tiny, source="")
    away = tmp_path_factory.mktemp("away")
    for part, seed, configurations in (("p", 0, ["a", "yarn"]), ("q", 1, ["a", "b"])):
        done = reproduce(
            study, tmp_path / part, configurations=configurations, seeds=1, first_seed=seed,
            figures=[5], data=tokens, workers=2, part=part,
            command=f"make {away}/{part}.tar.xz", records=away / f"{part}.tar.xz",
        )  # fmt: skip
        assert done.is_whole, done.failed
        record = read_jsonl(
            tmp_path / part / "results" / f"a-{seed}" / "position_loss.jsonl", PositionLoss
        )[0]
        assert record.provenance.part == part
    with tarfile.open(away / "p.tar.xz") as packed:
        names = packed.getnames()
        texts = [packed.extractfile(name).read().decode() for name in names]
    assert "runs/a-0/metrics.jsonl" in names and "results/yarn-0/sharpness.jsonl" in names
    assert not [name for name in names if "checkpoint" in name or "safetensors" in name]
    for name, text in zip(names, texts, strict=True):
        assert str(tmp_path) not in text and str(away) not in text, name

    folder = tmp_path / "study"
    assert merge([away / "p.tar.xz", away / "q.tar.xz"], folder) == ["p", "q"]
    findings = read_findings(folder)
    assert set(findings.position_losses["a"]) == {Replica(0, "p"), Replica(1, "q")}
    # In the paper's order, whichever part has what.
    for losses in (findings.position_losses, findings.same_theta_losses):
        assert list(losses) == ["a", "b", "yarn"]
    assert findings.runs == {"a": 2, "b": 1, "yarn": 1}
    assert findings.commands == ["make p.tar.xz", "make q.tar.xz"]
    comparisons, page = report(folder)
    told = {one.text: one for one in comparisons}
    one = told["beyond the training length (b) loses less than (a)"]
    assert one.basis == "2 documents, one seed"
    told = page.read_text()
    assert "made in parts" in told and "(a) softmax, 2 runs" in told and "SSMax, 1 run<" in told

    # yarn is (a) with another rule: its own loss, from no training of its own.
    losses = findings.position_losses
    assert losses["yarn"][Replica(0, "p")].mean != losses["a"][Replica(0, "p")].mean
    assert not (tmp_path / "p" / "runs" / "yarn-0").exists()

    other = dataclasses.replace(study, digits=3)
    reproduce(other, tmp_path / "r", figures=[1], data=tokens, part="r",
              records=tmp_path / "r.tar.xz")  # fmt: skip
    with pytest.raises(ValueError, match="part of another study"):
        merge([tmp_path / "r.tar.xz"], folder)
    with pytest.raises(ValueError, match="was begun with part 'p', not 'q'"):
        reproduce(study, tmp_path / "p", data=tokens, part="q")


def test_the_clock_stops_a_study_and_the_same_command_goes_on(
    tiny, tokens, tmp_path, caplog, monkeypatch
):
    caplog.set_level("INFO", "ssmax_lab")
    monkeypatch.setattr(scheduler, "SECONDS_TO_START", 0)
    longer = dataclasses.replace(
        tiny, pretraining=tiny.pretraining.with_overrides({"run.steps": 1_000_000})
    )
    folder, steps = tmp_path / "s", []
    # A busy machine may not come to its first step in time: then the command is given once more.
    while len(steps) < 2:
        stopped = reproduce(
            longer, folder, configurations=["a"], seeds=1, figures=[4], data=tokens,
            minutes=0.2, part="p", records=tmp_path / "p.tar.xz",
        )  # fmt: skip
        assert stopped.stopped_by == "clock" and not stopped.is_whole and not stopped.failed
        assert "the time is used" in caplog.text
        log = (folder / "logs" / "pretrain-a-0.log").read_text()
        found = re.findall(r"stopped by SIGTERM after step ([\d,]+)", log)
        steps = [int(step.replace(",", "")) for step in found]
    assert 0 < steps[0] < steps[1]
    # Nothing twice: the journal has every step once.
    with tarfile.open(tmp_path / "p.tar.xz") as packed:
        lines = packed.extractfile("runs/a-0/metrics.jsonl").read().decode().splitlines()
    made = [line["step"] for line in map(json.loads, lines) if line["kind"] == "step"]
    assert made == list(range(1, steps[-1] + 1))


def test_a_stop_by_the_clock_has_an_exit_status_of_its_own(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(scheduler, "SECONDS_TO_START", 0)
    typed = f"reproduce --configs a --seeds 1 --only figure4 --minutes 0.02 --out {tmp_path / 's'}"
    assert cli.run(typed.split()) == OUT_OF_TIME
    assert "the 0.02 minutes are used; what was done is kept" in capfd.readouterr().err


def test_what_cannot_be_finished_in_time_and_would_begin_again_is_not_started(
    tiny, tokens, tmp_path, monkeypatch
):
    """A loss is planned with all of the time; a training goes on, so it may start with less."""
    monkeypatch.setattr(scheduler, "SECONDS_TO_START", 0)
    study = dataclasses.replace(tiny, seconds={**tiny.seconds, "loss": 60})
    folder = tmp_path / "s"
    asked = {"configurations": ["a"], "seeds": 1, "data": tokens, "figures": [5]}
    done = reproduce(study, folder, minutes=1, **asked)
    assert done.stopped_by == "clock" and (folder / "done" / "pretrain-a-0.json").exists()
    assert not (folder / "logs" / "loss-a-0.log").exists()
    assert reproduce(study, folder, minutes=5, **asked).is_whole


def test_a_time_in_which_a_job_would_never_start_is_refused(tiny, tmp_path):
    """Else the same command would be given forever, and do nothing."""
    study = dataclasses.replace(tiny, seconds={**tiny.seconds, "loss": 90})
    message = "1 minutes are too few: loss-a-0 is not started with less than 90 .* at least 2"
    with pytest.raises(ValueError, match=message):
        reproduce(study, tmp_path / "s", configurations=["a"], seeds=1, figures=[5], minutes=1)


def test_two_runs_of_the_gpu_preset_with_all_measurements_fit_half_an_hour():
    study = gpu()
    seconds = makespan(study, plan(study, configurations=["a", "b"], seeds=1), workers=1)
    assert seconds - study.seconds["data"] < 29 * 60


@pytest.mark.parametrize(
    ("preset", "variant"), [(base, variant) for base in VARIANTS for variant in VARIANTS[base]]
)
def test_a_variant_is_the_preset_but_for_what_it_is_called_after(preset, variant):
    base, study = study_named(preset), study_named(f"{preset}:{variant}")
    changes = VARIANTS[preset][variant]
    assert study.preset == f"{preset}:{variant}"
    assert study.pretraining == base.pretraining.with_overrides(changes) != base.pretraining
    assert dataclasses.replace(study, preset=preset, pretraining=base.pretraining) == base


def test_twice_the_training_length_is_as_many_tokens_in_a_step():
    base, longer = study_named("small"), study_named("small:length-1k")
    assert longer.train_length == 2 * base.train_length
    assert longer.pretraining.tokens_per_step == base.pretraining.tokens_per_step
    assert longer.seconds == base.seconds


def test_the_small_study_has_three_seeds():
    assert min(study_named("small").seeds[name] for name in "abcdef") == 3


AT_TEST_TIME = {name: one for name, one in CONFIGURATIONS.items() if one.applied == "test time"}


@pytest.mark.parametrize("base", "abc")
def test_what_is_applied_at_test_time_needs_no_training_of_its_own(base):
    names = [name for name, one in AT_TEST_TIME.items() if one.base == base]
    jobs = plan(gpu(), configurations=names, seeds=1)
    assert {job.run for job in jobs if job.kind in ("pretrain", "finetune")} == {f"{base}-0"}
    assert {job.run for job in jobs if job.kind == "needle"} == {f"{name}-0" for name in names}


def test_n_held_changes_nothing_within_the_training_length(tiny, tokens, tmp_path):
    """Nor does it train anything; beyond, and under a constant everywhere, the loss is another."""
    configurations = ["a", "b", "c", "constant", "b_held", "c_held"]
    done = reproduce(
        tiny, tmp_path / "study", configurations=configurations, seeds=1, figures=[5], data=tokens,
        workers=2,
    )  # fmt: skip
    assert done.is_whole, done.failed
    losses = {
        name: next(iter(found.values()))
        for name, found in read_findings(tmp_path / "study").position_losses.items()
    }
    assert list(losses) == configurations
    length = tiny.train_length
    for held, base in {"b_held": "b", "c_held": "c"}.items():
        assert losses[held].mean[:length] == losses[base].mean[:length]
        assert losses[held].mean[length:] != losses[base].mean[length:]
    # At n = 1 there is nothing to sharpen.
    assert losses["constant"].mean[0] == losses["a"].mean[0]
    assert losses["constant"].mean[1:length] != losses["a"].mean[1:length]
    assert losses["constant"].run == f"a-0+temperature={tiny.test_constant:.4g}@{tiny.theta:g}"


def test_the_constant_is_yarns_for_as_far_as_positions_carry():
    """Theta x 50 carries the paper's model to 9,246 tokens, nine times its training length."""
    assert gpu().test_constant == pytest.approx((0.1 * math.log(9246 / 1024) + 1) ** 2, rel=1e-4)
    # Nothing turns: as far as anything is measured.
    assert study_named("small:no-rotary").test_constant == (0.1 * math.log(20) + 1) ** 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": 0}, "minutes must be more than 0"),
        ({"minutes": float("nan")}, "minutes must be more than 0 and finite"),
        ({"part": "a/b"}, "letters, digits"),
        ({"records": Path("records.zip")}, r"NAME\.tar\.xz"),
        ({"first_seed": -1}, "first_seed must be at least 0"),
        ({"device": "tpu", "dry_run": True}, "device must be cpu or cuda, got 'tpu'"),
        ({"configurations": ["x"]}, r"there is no configuration 'x'; known: a, b, "),
    ],
)
def test_bad_input_gets_one_clear_error(tiny, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        reproduce(tiny, tmp_path / "s", **options)


def made(study, folder, archive, **options):
    study = dataclasses.replace(study, source="")
    options = {"configurations": ["a"], "seeds": 1, "figures": [4], **options}
    done = reproduce(study, folder, records=archive, **options)
    assert done.is_whole, done.failed
    return archive


def test_pieces_of_another_text_or_of_one_name_do_not_fit(tiny, text, tokens, tmp_path):
    (tmp_path / "texts").mkdir()
    for path in text.iterdir():
        (tmp_path / "texts" / path.name).write_text(path.read_text().replace("beer", "milk"))
    prepare(str(tmp_path / "texts"), tmp_path / "other", tokenizer="bytes", workers=1,
            validation_fraction=0.2)  # fmt: skip
    one = made(tiny, tmp_path / "one", tmp_path / "1.tar.xz", data=tokens, part="p")
    other = made(tiny, tmp_path / "two", tmp_path / "2.tar.xz", data=tmp_path / "other", part="q")
    namesake = made(
        tiny, tmp_path / "three", tmp_path / "3.tar.xz", data=tokens, part="p", first_seed=1
    )
    for wrong, message in (
        (other, "was made with other tokens than the parts that are there, data"),
        (namesake, r"both called part 'p', and .*3.tar.xz lacks pretrain-a-0; name parts"),
    ):
        with pytest.raises(ValueError, match=message):
            merge([one, wrong], tmp_path / "study")
        assert not (tmp_path / "study").exists()
    # With all that the first has, a part takes its place.
    more = made(tiny, tmp_path / "one", tmp_path / "4.tar.xz", data=tokens, part="p", seeds=2)
    assert merge([one], tmp_path / "study") == ["p"]
    assert merge([more], tmp_path / "study") == ["p"]
    assert len(read_findings(tmp_path / "study").curves["a"]) == 2
    # However it is spelled, it is there; and a copy that was cut off is no part to keep.
    there = tmp_path / "study" / "parts" / "p.tar.xz"
    assert merge([tmp_path / "one" / ".." / "study" / "parts" / "p.tar.xz"], tmp_path / "study")
    there.write_bytes(there.read_bytes()[:500])
    assert merge([one], tmp_path / "study") == ["p"]
    assert there.read_bytes() == one.read_bytes()


def test_a_study_of_its_own_is_not_hidden_behind_pieces(tiny, tokens, tmp_path):
    archive = made(tiny, tmp_path / "s", tmp_path / "p.tar.xz", data=tokens, part="p")
    with pytest.raises(ValueError, match="holds a study that was made there"):
        merge([archive], tmp_path / "s")
    assert read_findings(tmp_path / "s").curves["a"]


def test_a_folder_holds_one_text_whatever_its_path(tiny, text, tokens, tmp_path):
    shutil.copytree(tokens, tmp_path / "tokens")
    asked = {"configurations": ["a"], "seeds": 1, "figures": [4], "data": tmp_path / "tokens"}
    assert reproduce(tiny, tmp_path / "s", **asked).is_whole
    shutil.rmtree(tmp_path / "tokens")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "0.txt").write_text("Milk. " * 2000)
    (tmp_path / "texts" / "1.txt").write_text("Water. " * 2000)
    prepare(str(tmp_path / "texts"), tmp_path / "tokens", tokenizer="bytes", workers=1,
            validation_fraction=0.5)  # fmt: skip
    with pytest.raises(ValueError, match="was begun with other tokens in its data folder"):
        reproduce(tiny, tmp_path / "s", **asked)


def test_questions_are_known_by_what_they_are_not_by_where(tiny, tokens, tmp_path):
    asked = {"configurations": ["a"], "seeds": 1, "figures": [1], "data": tokens}
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "q.json").write_text("{}")
        study = tiny.with_questions(f"{tmp_path / name / 'q.json'}+hidden:5")
        assert reproduce(study, tmp_path / "s", **asked).is_whole
    (tmp_path / "there" / "q.json").write_text("[]")
    with pytest.raises(ValueError, match=r"was begun with other questions than those in .*there"):
        reproduce(study, tmp_path / "s", **asked)
    with pytest.raises(ValueError, match="holds another study"):
        reproduce(tiny.with_questions("hidden:5"), tmp_path / "s", **asked)


@pytest.mark.parametrize(
    ("questions", "digits"), [("hidden:7", 7), ("q.json+hidden:5", 5), ("q.json", 4)]
)
def test_numbers_are_as_long_in_the_test_as_those_that_were_taught(questions, digits):
    assert study_named("small").with_questions(questions).digits == digits


def test_a_study_goes_on_with_what_a_run_may_change(tiny, tokens, tmp_path):
    asked = {"configurations": ["a"], "seeds": 1, "figures": [4], "data": tokens}
    assert reproduce(tiny, tmp_path / "s", **asked).is_whole
    how = tiny.with_settings({"run.on_nonfinite": "skip", "run.micro_batch": 1})
    assert reproduce(how, tmp_path / "s", **asked).is_whole
    for other in ({"run.steps": 13}, {"optim.lr": 0.5}):
        with pytest.raises(ValueError, match="holds another study"):
            reproduce(tiny.with_settings(other), tmp_path / "s", **asked)


def test_packing_takes_out_paths_and_nothing_else(tiny, tmp_path):
    """Text prepared right under the root has no folder to take out; JSON spells letters anew."""
    folder = tmp_path / "J\u00f6rg" / "s"
    (folder / "results" / "a-0").mkdir(parents=True)
    values = {"study": tiny.to_dict(), "data": "/data", "commands": [f"ssmax --out {folder}/x"]}
    (folder / "study.json").write_text(json.dumps(values))
    line = json.dumps({"said": "http://x // y", "text": str(folder.parent / "tokens")}) + "\n"
    (folder / "results" / "a-0" / "needle.jsonl").write_text(line)
    pack(folder, tmp_path / "p.tar.xz")
    with tarfile.open(tmp_path / "p.tar.xz") as packed:
        study, said = (
            json.loads(packed.extractfile(name).read())
            for name in ("study.json", "results/a-0/needle.jsonl")
        )
    assert (study["data"], study["commands"]) == ("/data", ["ssmax --out x"])
    assert said == {"said": "http://x // y", "text": "tokens"}


def test_a_study_and_its_text_may_be_moved_together(tiny, tokens, tmp_path):
    shutil.copytree(tokens, tmp_path / "old" / "tokens")
    asked = {"configurations": ["a"], "seeds": 1, "figures": [4]}
    assert reproduce(tiny, tmp_path / "old/s", data=tmp_path / "old/tokens", **asked).is_whole
    (tmp_path / "old").rename(tmp_path / "new")
    assert reproduce(tiny, tmp_path / "new/s", data=tmp_path / "new/tokens", **asked).is_whole


def test_records_that_cannot_be_written_are_told_when_the_page_is_there(tiny, tokens, tmp_path):
    (tmp_path / "away").write_text("a file")
    with pytest.raises(OSError, match=r"records cannot be written to .*away.p\.tar\.xz"):
        reproduce(tiny, tmp_path / "s", figures=[1], data=tokens,
                  records=tmp_path / "away" / "p.tar.xz")  # fmt: skip
    assert (tmp_path / "s" / "report.html").exists()


def test_text_to_measure_on_has_the_tokens_of_the_training(tiny, text, tokens, tmp_path):
    prepare(str(text), tmp_path / "small", tokenizer="small", workers=1, validation_fraction=0.2)
    with pytest.raises(ValueError, match="prepare both with one tokenizer"):
        reproduce(tiny, tmp_path / "s", data=tokens, test=tmp_path / "small")


def test_nothing_to_do_is_no_study(tiny, tokens, tmp_path):
    with pytest.raises(ValueError, match="there is nothing to do"):
        reproduce(tiny, tmp_path / "s", configurations=["a"], figures=[2], data=tokens)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("key", ["run.seed=7", "data.folder=x", "model.rule=ssmax"])
def test_what_a_study_decides_is_not_set(key, tmp_path, capsys):
    typed = ["reproduce", "--dry-run", "--set", key, "--out", str(tmp_path / "s")]
    assert cli.run(typed) == 2
    assert f"{key.partition('=')[0]} is different for every run" in capsys.readouterr().err


def test_a_damaged_piece_is_refused(tmp_path):
    # Long enough that opening it does not read it all.
    (tmp_path / "study.json").write_bytes(random.Random(0).randbytes(100_000))
    archive = tmp_path / "p.tar.xz"
    with tarfile.open(archive, "w:xz") as packed:
        packed.add(tmp_path / "study.json", "study.json")
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 1
    archive.write_bytes(content)
    with pytest.raises(ValueError, match="is no part of a study"):
        merge([archive], tmp_path / "study")


def test_what_is_no_piece_is_refused(tmp_path):
    (tmp_path / "no.tar.xz").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is no part of a study"):
        merge([tmp_path / "no.tar.xz"], tmp_path / "study")
    with tarfile.open(tmp_path / "empty.tar.xz", "w:xz"):
        pass
    with pytest.raises(ValueError, match=r"empty.tar.xz is no part .* holds no study.json"):
        merge([tmp_path / "empty.tar.xz"], tmp_path / "study")


def test_merged_parts_do_not_hide_a_study(tiny, tokens, tmp_path):
    """`read_findings` would not look at what was made beside them."""
    archive = made(tiny, tmp_path / "s", tmp_path / "p.tar.xz", data=tokens, part="p")
    merge([archive], tmp_path / "study")
    with pytest.raises(ValueError, match="holds merged parts, behind which new work would be"):
        reproduce(tiny, tmp_path / "study", data=tokens, first_seed=1, dry_run=True)


def packed_again(archive, folder, change):
    """A part with a file of it changed."""
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    change(folder)
    with tarfile.open(folder.with_suffix(".tar.xz"), "w:xz") as packed:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                packed.add(path, path.relative_to(folder).as_posix())
    return folder.with_suffix(".tar.xz")


@pytest.mark.parametrize("name", ["done/loss-a-0.json", "results/a-0/position_loss.jsonl"])
def test_a_namesake_with_other_numbers_is_refused(tiny, tokens, tmp_path, name):
    one = made(tiny, tmp_path / "s", tmp_path / "p.tar.xz", data=tokens, part="p", figures=[5])
    assert merge([one, one], tmp_path / "study") == ["p"]

    def change(folder):
        (folder / name).write_text((folder / name).read_text().replace(".", ".1", 1))

    other = packed_again(one, tmp_path / "other", change)
    with pytest.raises(ValueError, match=r"both called part 'p', and .* has others of loss-a-0"):
        merge([other], tmp_path / "study")


def test_damaged_records_are_named_and_verdicts_made_anew(tiny, tokens, tmp_path):
    folder = tmp_path / "s"
    made(tiny, folder, tmp_path / "p.tar.xz", data=tokens, figures=[5])
    verdicts = folder / "verdicts.jsonl"
    there = verdicts.read_text()
    verdicts.write_text("garbage\n")
    report(folder)
    assert verdicts.read_text() == there
    for name, content, message in (
        (
            "results/a-0/sharpness.jsonl",
            "",
            r"empty; take away done/loss-a-0.json",
        ),
        ("runs/a-0/metrics.jsonl", '{"kind": "st', r"metrics.jsonl has no steps"),
        ("runs/a-0/config.json", "{", r"config.json is not the record of a run"),
    ):
        before = (folder / name).read_text()
        (folder / name).write_text(content)
        with pytest.raises(ValueError, match=message):
            report(folder)
        (folder / name).write_text(before)


def archive_of(path, content):
    with tarfile.open(path, "w:xz") as packed:
        entry = tarfile.TarInfo("study.json")
        entry.size = len(content)
        packed.addfile(entry, io.BytesIO(content))
    return path


CRAFTED = {
    "a number as a part": lambda study: {"part": 5},
    "a path as a part": lambda study: {"part": "../x"},
    "jobs that are no list": lambda study: {"jobs": 5},
    "commands that are no texts": lambda study: {"commands": [{}]},
    "texts that are no names": lambda study: {"texts": [1]},
    "a number as a study": lambda study: {"study": 5},
    "a study without settings": lambda study: {"study": {**study, "finetuning": 5}},
    "a study with unknown settings": lambda study: {"study": {**study, "finetuning": {"x": {}}}},
    "no finetuning": lambda study: {"study": {**study, "finetuning": None}},
    "nested": lambda study: b"[" * 100_000,
    "not UTF-8": lambda study: b"\xff\xfe{}",
    "a number": lambda study: b"5",
    "a list": lambda study: b"[]",
    "null": lambda study: b"null",
    "nothing": lambda study: b"",
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_piece_is_one_line_that_names_it(name, tmp_path, capsys):
    values = {"study": json.loads(json.dumps(dataclasses.asdict(gpu()))), "jobs": []}
    good = archive_of(tmp_path / "good.tar.xz", json.dumps(values).encode())
    content = CRAFTED[name](values["study"])
    if isinstance(content, dict):
        content = json.dumps({**values, **content}).encode()
    bad = archive_of(tmp_path / "bad.tar.xz", content)
    assert cli.run(["merge", str(tmp_path / "study"), str(good)]) == 0
    before = (tmp_path / "study" / "study.json").read_bytes()
    for folder in ("study", "new"):
        assert cli.run(["merge", str(tmp_path / folder), str(bad)]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"ssmax: {bad}: ") and told.count("\n") == 1
        assert "study.json" in told or "part" in told
    assert (tmp_path / "study" / "study.json").read_bytes() == before
    assert not (tmp_path / "new").exists()
