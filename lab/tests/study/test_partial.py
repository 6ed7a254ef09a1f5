"""Partial results: records packed without weights and paths, merged where they fit."""

import dataclasses
import io
import json
import random
import tarfile

import numpy as np
import pytest

from ssmax_lab import cli
from ssmax_lab.analysis.findings import Replica, read_findings
from ssmax_lab.records import (
    NeedleScore,
    PositionLoss,
    Provenance,
    Sharpness,
    config_hash,
    read_jsonl,
    to_jsonl,
)
from ssmax_lab.study.partial import merge, pack
from ssmax_lab.study.reproduction import report, reproduce

HERE = Provenance(
    commit="0", config_hash=config_hash({}), versions={}, device="cpu", seed=0, date="2026-11-19"
)


@pytest.mark.slow
def test_parts_are_made_packed_merged_and_judged(tiny, tokens, tmp_path, tmp_path_factory):
    study = dataclasses.replace(tiny, source="")
    away = tmp_path_factory.mktemp("away")
    for part, seed, configurations in (("p", 0, ["a", "yarn"]), ("q", 1, ["a", "b"])):
        done = reproduce(
            study, tmp_path / part, configurations=configurations, seeds=1, first_seed=seed,
            figures=[5], data=tokens, workers=2,
            command=f"make {away}/{part}.tar.xz", records=away / f"{part}.tar.xz",
        )  # fmt: skip
        assert done.is_whole, done.failed
        path = tmp_path / part / "results" / f"a-{seed}" / "position_loss.jsonl"
        assert read_jsonl(path, PositionLoss)[0].provenance.part == part
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
    assert one.basis == "1 seed"
    told = page.read_text()
    assert "made in parts" in told and "(a) softmax, 2 runs" in told and "SSMax, 1 run<" in told

    # yarn is (a) with another rule: its own loss, from no training of its own.
    losses = read_findings(tmp_path / "p").position_losses
    assert losses["yarn"][Replica(0)].mean != losses["a"][Replica(0)].mean
    assert not (tmp_path / "p" / "runs" / "yarn-0").exists()

    with pytest.raises(ValueError, match="holds merged parts"):
        reproduce(study, folder, data=tokens, first_seed=1, dry_run=True)


LOSSES = np.random.default_rng(0).normal(3, 0.3, 4096)
TOP = [[0.123456789, 1e-9], [0.5, 0.25]]


def study_folder(folder, study, *, seeds=(0,), text="1", loss=3.0):
    """What a machine has when it made the loss of (a): written by hand, in no time."""

    def write(name, content):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    values = {"study": study.to_dict(), "texts": {"data": text}}
    write("study.json", json.dumps(values))
    here = dataclasses.asdict(HERE)
    for seed in seeds:
        for job in ("pretrain", "loss"):
            write(f"done/{job}-a-{seed}.json", json.dumps({"seconds": 1.5}))
        lines = [
            {"kind": "step", "step": 1, "loss": loss, "lr": 0.1, "grad_norm": 0.2},
            *({"kind": "scale", "step": step, "values": {"x.s": [step]}} for step in (0, 1)),
        ]
        write(f"runs/a-{seed}/metrics.jsonl", "".join(json.dumps(one) + "\n" for one in lines))
        write(f"runs/a-{seed}/config.json", json.dumps({"provenance": here}))
        made = PositionLoss(
            run="a", mean=(LOSSES + loss).tolist(), count=2, edges=[0, 64], binned=[[loss], [0.1]],
            provenance=HERE,
        )  # fmt: skip
        write(f"results/a-{seed}/position_loss.jsonl", to_jsonl([made]))
    return folder


@pytest.fixture
def packed(tiny, tmp_path):
    """Makes a part, packed."""

    def make(name, study=tiny, *, folder="here", **options):
        archive = tmp_path / folder / f"{name}.tar.xz"
        pack(study_folder(tmp_path / f"of-{folder}-{name}", study, **options), archive)
        return archive

    return make


def test_what_is_packed_is_rounded_and_its_means_are_not(packed, tiny, tmp_path):
    folder = study_folder(tmp_path / "s", tiny)
    here = {"run": "a", "provenance": HERE}
    records = {
        "needle_score": NeedleScore(
            length=9, depth=0.5, trial=0, number="1", said="1", is_whole=True, first_digit=True,
            number_scores=TOP, **here,
        ),
        "sharpness": Sharpness(num_keys=[1], entropy=[[[1 / 3]]], largest=[[[2 / 3]]], count=1,
                               **here),
    }  # fmt: skip
    for name, record in records.items():
        (folder / "results/a-0" / f"{name}.jsonl").write_text(to_jsonl([record]))
    (folder / "done/needle-a-0.json").write_text("{}")
    pack(folder, tmp_path / "s.tar.xz")
    merge([tmp_path / "s.tar.xz"], tmp_path / "study")
    first, second = read_findings(folder), read_findings(tmp_path / "study")
    assert second.runs == first.runs and second.scales == first.scales
    with tarfile.open(tmp_path / "s.tar.xz") as packed:
        metrics = packed.extractfile("runs/a-0/metrics.jsonl").read().decode()
    assert metrics.count('"scale"') == 1
    ((before,), (after,)) = (
        [np.array(one.mean) for one in findings.position_losses["a"].values()]
        for findings in (first, second)
    )
    assert 1e-4 < abs(after - before).max() <= 5e-4
    for start in range(0, 4096, 32):
        for stop in (start + max(32, start // 16), 4096):
            assert after[start:stop].mean() == pytest.approx(before[start:stop].mean(), abs=2e-4)
    ((score,),) = second.scores["a"].values()
    assert score.number_scores == [[0.1235, 1e-9], [0.5, 0.25]]
    (sharpness,) = second.sharpness["a"].values()
    assert (sharpness.entropy, sharpness.largest) == ([[[0.3333]]], [[[0.6667]]])


def test_a_loss_that_is_not_finite_stays_where_it_is(packed, tmp_path):
    merge([packed("p", loss=float("inf"))], tmp_path / "study")
    findings = read_findings(tmp_path / "study")
    assert findings.curves["a"][Replica(0)][1] == [float("inf")]


def test_packing_takes_out_paths_and_nothing_else(tiny, tmp_path):
    """Text prepared right under the root has no folder to take out; JSON spells letters anew."""
    folder = study_folder(tmp_path / "J\u00f6rg" / "s", tiny)
    values = {"study": tiny.to_dict(), "commands": [f"ssmax --out {folder}/x --data /data"]}
    (folder / "study.json").write_text(json.dumps(values))
    line = json.dumps({"questions": f"{folder}/q.json+hidden:7", "folder": str(folder)})
    (folder / "runs/a-0/config.json").write_text(line)
    line = json.dumps({"said": "http://x // y"})
    (folder / "results/a-0/needle.jsonl").write_text(line + "\n")
    pack(folder, tmp_path / "p.tar.xz")
    with tarfile.open(tmp_path / "p.tar.xz") as packed:
        study, config, needle = (
            json.loads(packed.extractfile(name).read())
            for name in ("study.json", "runs/a-0/config.json", "results/a-0/needle.jsonl")
        )
    assert study["commands"] == ["ssmax --out x --data data"]
    assert config == {"questions": "q.json+hidden:7", "folder": "s"}
    assert needle == {"said": "http://x // y"}


def test_parts_that_do_not_fit_are_refused_and_nothing_is_merged(packed, tiny, tmp_path):
    one = packed("p")
    for wrong, message in (
        (packed("text", text="2"), r"made with other tokens \(--data\)"),
        (packed("study", dataclasses.replace(tiny, digits=3)), "holds another study"),
        (packed("p", folder="there", seeds=[1]), r"p.tar.xz lacks loss-a-0, .* different names"),
    ):
        with pytest.raises(ValueError, match=message):
            merge([one, wrong], tmp_path / "study")
        assert not (tmp_path / "study").exists()


def test_a_part_takes_its_own_place_with_all_that_it_had(packed, tmp_path):
    one, more = packed("p"), packed("p", folder="later", seeds=[0, 1])
    study = tmp_path / "study"
    for archive, seeds in ((one, 1), (one, 1), (more, 2)):
        assert merge([archive], study) == ["p"]
        assert len(read_findings(study).curves["a"]) == seeds
    # However it is spelled, it is there; and a copy that was cut off is no part to keep.
    there = study / "parts" / "p.tar.xz"
    assert merge([study / ".." / "study" / "parts" / "p.tar.xz"], study) == ["p"]
    there.write_bytes(there.read_bytes()[:500])
    assert merge([one], study) == ["p"]
    assert there.read_bytes() == one.read_bytes()


def test_a_study_of_its_own_is_not_hidden_behind_parts(packed, tmp_path):
    archive = packed("p")
    with pytest.raises(ValueError, match="holds a study that was made there"):
        merge([archive], tmp_path / "of-here-p")
    assert read_findings(tmp_path / "of-here-p").curves["a"]


def archive_of(path, content):
    with tarfile.open(path, "w:xz") as packed:
        entry = tarfile.TarInfo("study.json")
        entry.size = len(content)
        packed.addfile(entry, io.BytesIO(content))
    return path


def test_what_is_no_part_is_refused(tmp_path):
    nothing, empty = tmp_path / "no.tar.xz", tmp_path / "empty.tar.xz"
    nothing.write_bytes(b"nothing")
    with tarfile.open(empty, "w:xz"):
        pass
    # Long enough that opening it does not read it all.
    damaged = archive_of(tmp_path / "damaged.tar.xz", random.Random(0).randbytes(100_000))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    for archive in (nothing, empty, damaged):
        with pytest.raises(ValueError, match=f"{archive.name}(: it)? is no (part of a )?study"):
            merge([archive], tmp_path / "study")


@pytest.mark.parametrize("content", [b'{"study": 5}', b'{"study": {}}', b"\xff\xfe{}", b""])
def test_a_crafted_part_is_one_line_that_names_it(content, packed, tmp_path, capsys):
    bad = archive_of(tmp_path / "bad.tar.xz", content)
    assert cli.run(["merge", str(tmp_path / "study"), str(packed("good"))]) == 0
    before = (tmp_path / "study" / "study.json").read_bytes()
    for folder in ("study", "new"):
        assert cli.run(["merge", str(tmp_path / folder), str(bad)]) == 2
        told = capsys.readouterr().err
        assert str(bad) in told and told.count("\n") == 1 and "study.json" in told
    assert (tmp_path / "study" / "study.json").read_bytes() == before
    assert not (tmp_path / "new").exists()
