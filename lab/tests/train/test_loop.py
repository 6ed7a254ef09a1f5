"""The loop's laws: what does not change a run, and what a run leaves behind."""

import dataclasses
import json
import os
import signal

import pytest
import torch

from ssmax._progress import logging_to_terminal
from ssmax.errors import NonfiniteError, UsageError
from ssmax_lab.data.preparation import prepare
from ssmax_lab.data.qa import IGNORE
from ssmax_lab.data.tokenizer import load_tokenizer
from ssmax_lab.model import LM, load_lm
from ssmax_lab.records import read_metrics
from ssmax_lab.train.checkpoint import branch, checkpoint_folder, newest_checkpoint, read_state
from ssmax_lab.train.cost import flops_per_token
from ssmax_lab.train.dist import clip_gradients, single_process
from ssmax_lab.train.loop import graceful_shutdown
from ssmax_lab.train.pretraining import pretrain
from ssmax_lab.train.run import MetricsMark, MetricsWriter, load_run_model, resumed_config
from ssmax_lab.train.step import Batch, Loss, accumulate_gradients, learning_rate, make_optimizer

CPU = single_process(torch.device("cpu"))


def weights_of(folder):
    return load_run_model(folder).state_dict()


def assert_equal_runs(one, other):
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    for (name, mine), theirs in zip(
        weights_of(one).items(), weights_of(other).values(), strict=True
    ):
        assert torch.equal(mine, theirs), name


def test_a_run_leaves_what_the_next_rooms_read(small, tmp_path, capsys):
    config = small("b")
    with logging_to_terminal():
        outcome = pretrain(config, tmp_path / "run", ranks=CPU)
    assert (outcome.step, outcome.stopped_by) == (12, None)
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl", "step")
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert [line["lr"] for line in steps[:5]] == pytest.approx([5e-4, 1e-3, 1.5e-3, 2e-3, 2e-3])
    looks = read_metrics(tmp_path / "run" / "metrics.jsonl", "validation")
    assert [line["step"] for line in looks] == [5, 10, 12]
    scales = read_metrics(tmp_path / "run" / "metrics.jsonl", "scale")
    assert [line["step"] for line in scales] == [3, 6, 9, 12]
    assert len(scales[0]["values"]["blocks.1.attention.ssmax.s"]) == 2
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["optim"]["lr"] == config.optim.lr
    assert stored["provenance"]["config_hash"]
    assert stored["data"]["tokenizer"] == "bytes"
    model = load_lm(tmp_path / "run" / "model")
    assert model.config.rule == "ssmax"
    out, err = capsys.readouterr()
    assert out == "" and "step 12/12" in err


def test_the_tokenizer_of_a_run_is_that_of_its_text_byte_for_byte(small, tmp_path):
    """Also where its lines end as on Windows."""
    definition = load_tokenizer("small").definition.encode() + b"\r\n"
    (tmp_path / "windows.json").write_bytes(definition)
    (tmp_path / "text.txt").write_text("some words " * 200)
    options = {"tokenizer": str(tmp_path / "windows.json"), "workers": 1}
    prepare(tmp_path / "text.txt", tmp_path / "text", **options)
    config = small("a", data__folder=str(tmp_path / "text"), run__steps=1, model__vocab_size=768)
    pretrain(config, tmp_path / "run", ranks=CPU)
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == definition


def test_two_runs_of_one_seed_are_one_run(small, tmp_path):
    for name in ("one", "other"):
        pretrain(small("d"), tmp_path / name, ranks=CPU)
    assert_equal_runs(tmp_path / "one", tmp_path / "other")


def test_f_may_branch_off_from_a(small, tmp_path):
    """A run that switches is the other one until then, so its first part need not be made again."""
    config = small("f")
    pretrain(config, tmp_path / "whole", ranks=CPU)
    a = tmp_path / "a"
    pretrain(small("a", run__checkpoint_every=1, run__keep_checkpoints=1), a, ranks=CPU)
    assert not branch(a, config.switch_step, tmp_path / "too late")
    assert not (tmp_path / "too late").exists()
    a = tmp_path / "kept"
    kept = small("a", run__checkpoint_every=1, run__keep_checkpoints=1)
    pretrain(kept, a, ranks=CPU, keep_step=config.switch_step)
    steps = sorted(read_state(folder).step for folder in (a / "checkpoints").glob("step-*"))
    assert steps == [config.switch_step, 12]
    for _ in range(2):  # killed before anything was written down, it is done once more
        assert branch(a, config.switch_step, tmp_path / "branch")
    pretrain(config, tmp_path / "branch", ranks=CPU, resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "branch")
    (checkpoint_folder(a, config.switch_step) / "state.json").write_text("{}")
    assert not branch(a, config.switch_step, tmp_path / "damaged")


def test_micro_batches_do_not_change_a_run(small, tmp_path):
    pretrain(small("b", run__micro_batch=4), tmp_path / "whole", ranks=CPU)
    pretrain(small("b", run__micro_batch=1), tmp_path / "parts", ranks=CPU)
    for line, other in zip(
        *(read_metrics(tmp_path / n / "metrics.jsonl", "step") for n in ("whole", "parts")),
        strict=True,
    ):
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-5)


@pytest.mark.parametrize(("letter", "step"), [("b", 1), ("b", 4), ("f", 7), ("f", 11)])
def test_a_run_that_was_stopped_is_one_that_never_was(
    small, tmp_path, monkeypatch, stop_after, step, letter
):
    config = small(letter, model__dropout_p=0.1)
    pretrain(config, tmp_path / "whole", ranks=CPU)
    with monkeypatch.context() as patch:
        stop_after(patch, step)
        outcome = pretrain(config, tmp_path / "stopped", ranks=CPU)
    assert (outcome.step, outcome.stopped_by) == (step, "SIGTERM")
    # What was written after the checkpoint, by a process that then died.
    with (tmp_path / "stopped" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 99}\n{"kind": "st')
    pretrain(resumed_config(tmp_path / "stopped", {}), tmp_path / "stopped", ranks=CPU, resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "stopped")


def test_resuming_a_finished_run_changes_nothing(small, tmp_path):
    pretrain(small("b"), tmp_path / "run", ranks=CPU)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    outcome = pretrain(small("b"), tmp_path / "run", ranks=CPU, resume=True)
    assert outcome.step == 12
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


def test_more_steps_go_on_where_fewer_ended(small, tmp_path):
    pretrain(small("b"), tmp_path / "short", ranks=CPU)
    longer = resumed_config(tmp_path / "short", {"run.steps": "16"})
    pretrain(longer, tmp_path / "short", ranks=CPU, resume=True)
    pretrain(small("b", run__steps=16), tmp_path / "long", ranks=CPU)
    for (name, mine), theirs in zip(
        weights_of(tmp_path / "short").items(), weights_of(tmp_path / "long").values(), strict=True
    ):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize(
    ("letter", "overrides", "message"),
    [
        ("b", {"optim.lr": "1"}, "optim.lr cannot change in a run that resumes"),
        ("b", {"run.batch_size": "8"}, "run.batch_size cannot change"),
        ("f", {"run.steps": "16"}, "run.steps cannot change in a run whose schedule or switch"),
    ],
)
def test_what_was_computed_cannot_be_changed_afterwards(
    small, tmp_path, letter, overrides, message
):
    pretrain(small(letter, run__steps=2), tmp_path / "run", ranks=CPU)
    with pytest.raises(ValueError, match=message):
        resumed_config(tmp_path / "run", overrides)


def test_the_switch_leaves_every_other_weight_and_its_optimizer_bit_equal(small, tmp_path):
    """(f) at its switch is (a) at that step: the same metrics before, the same tensors."""
    config = small("f", switch__last_fraction=0.5, run__checkpoint_every=6, run__keep_checkpoints=9)
    pretrain(config, tmp_path / "f", ranks=CPU)
    pretrain(small("a", run__steps=6, run__checkpoint_every=6), tmp_path / "a", ranks=CPU)
    from safetensors import safe_open

    def tensors(run, step):
        (path,) = (tmp_path / run / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)

    before, softmax = tensors("f", 6), tensors("a", 6)
    assert set(before) == set(softmax)
    assert all(torch.equal(before[name], softmax[name]) for name in before)
    after = tensors("f", 12)
    new = set(after) - set(before)
    assert new and all(".ssmax." in name for name in new)
    # The optimizer goes on counting for what it knew and begins with what is new.
    assert after["optimizer.embedding.weight.step"] == 12
    assert after["optimizer.blocks.0.attention.ssmax.s.step"] == 6
    assert load_lm(tmp_path / "f" / "model").config.rule == "ssmax"


@pytest.mark.parametrize("letter", ["a", "b", "c", "d", "f", "probe", "temperature", "sqrt_log"])
def test_every_configuration_trains(small, tmp_path, letter):
    outcome = pretrain(
        small(letter, run__steps=4, schedule__warmup_steps=0), tmp_path / "run", ranks=CPU
    )
    assert outcome.step == 4
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl", "step")]
    assert losses[-1] < losses[0] - 0.01


def test_what_the_new_model_starts_from_is_what_the_old_one_ended_with(
    small, tmp_path, monkeypatch
):
    """Right after the switch, before the next step: weights and moments, bit for bit."""
    from ssmax.ops.length import initial_s
    from ssmax_lab.train import loop
    from ssmax_lab.train.checkpoint import load_tensors, training_tensors

    started = []
    real = loop.Training._build

    def watched(self, config, found, first_weights):
        real(self, config, found, first_weights)
        if found is None:
            return
        tensors = training_tensors(self.model, self.optimizer)
        started.append((found, {name: tensor.clone() for name, tensor in tensors.items()}))

    monkeypatch.setattr(loop.Training, "_build", watched)
    config = small(
        "temperature",
        switch__rule="ssmax",
        switch__last_fraction=0.5,
        optim__lr=0.01,
        run__keep_checkpoints=9,
    )
    pretrain(config, tmp_path / "run", ranks=CPU)
    ((found, after),) = started
    ended = {n: torch.zeros_like(t) for n, t in after.items() if ".ssmax." not in n}
    load_tensors(found, ended, CPU)
    assert len(ended) > 50 and all(torch.equal(after[name], ended[name]) for name in ended)
    assert any(tensor.abs().sum() > 0 for name, tensor in ended.items() if "exp_avg" in name)
    # Temperature's s has another meaning: SSMax starts from its own.
    s = after["model.blocks.0.attention.ssmax.s"]
    torch.testing.assert_close(s, torch.full_like(s, initial_s(16)))


def test_the_old_model_is_gone_before_the_new_one_is_built(small, tmp_path, monkeypatch):
    import gc
    import weakref

    from ssmax_lab.train import loop

    models, alive = [], []
    real = loop.LM

    def built(config):
        gc.collect()
        alive.append(sum(model() is not None for model in models))
        model = real(config)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(loop, "LM", built)
    pretrain(small("f", run__steps=4), tmp_path / "run", ranks=CPU)
    assert alive == [0, 0]


def test_a_start_that_is_refused_leaves_the_name_free(small, tmp_path, monkeypatch):
    from ssmax_lab.train import loop

    def unbuildable(_):
        raise ValueError("no such model")

    config = small("b", data__validation_windows=0, run__steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "LM", unbuildable)
        with pytest.raises(ValueError, match="no such model"):
            pretrain(config, tmp_path / "run", ranks=CPU)
    assert not (tmp_path / "run" / "config.json").exists()
    pretrain(config, tmp_path / "run", ranks=CPU)
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(ValueError, match="data.seed cannot change in a run that resumes"):
        other = config.with_overrides({"data.seed": 5, "run.steps": 4})
        pretrain(other, tmp_path / "run", ranks=CPU, resume=True)
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_the_same_command_resumes(small, tmp_path):
    config = small("b", run__steps=2)
    pretrain(config, tmp_path / "run", ranks=CPU)
    same = resumed_config(tmp_path / "run", {"optim.lr": str(config.optim.lr), "run.steps": "2"})
    assert same.optim == config.optim


def test_a_run_cannot_be_made_shorter_than_it_is(small, tmp_path):
    pretrain(small("b", run__steps=4), tmp_path / "run", ranks=CPU)
    shorter = resumed_config(tmp_path / "run", {"run.steps": 2})
    with pytest.raises(ValueError, match="has done 4 steps already"):
        pretrain(shorter, tmp_path / "run", ranks=CPU, resume=True)


def test_a_run_that_goes_on_has_no_finished_model_yet(small, tmp_path, monkeypatch, stop_after):
    pretrain(small("b", run__steps=4), tmp_path / "run", ranks=CPU)
    short = weights_of(tmp_path / "run")
    stop_after(monkeypatch, 2)
    longer = resumed_config(tmp_path / "run", {"run.steps": 8})
    assert pretrain(longer, tmp_path / "run", ranks=CPU, resume=True).step == 6
    assert not (tmp_path / "run" / "model").exists()
    newest = weights_of(tmp_path / "run")
    assert not torch.equal(short["head.weight"], newest["head.weight"])


def poison(monkeypatch, at_step):
    """The loss of one step is NaN."""
    from ssmax_lab.train import loop

    calls = {"steps": 0}

    def poisoned(loss, batches, ranks, precision):
        calls["steps"] += 1
        value = accumulate_gradients(loss, batches, ranks, precision)
        if calls["steps"] == at_step:
            for parameter in loss.parameters():
                parameter.grad.fill_(torch.nan)
            return value * torch.nan
        return value

    monkeypatch.setattr(loop, "accumulate_gradients", poisoned)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(
    small, tmp_path, monkeypatch
):
    poison(monkeypatch, 7)
    with pytest.raises(NonfiniteError, match=r"at step 7; the last good checkpoint is .*00000004"):
        pretrain(small("b"), tmp_path / "run", ranks=CPU)
    found, _ = newest_checkpoint(tmp_path / "run")
    assert found is not None and read_state(found).step == 4
    kinds = [line["kind"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert kinds[-1] == "nonfinite"
    monkeypatch.undo()
    outcome = pretrain(small("b"), tmp_path / "run", ranks=CPU, resume=True)
    pretrain(small("b"), tmp_path / "clean", ranks=CPU)
    assert outcome.step == 12
    assert_equal_runs(tmp_path / "run", tmp_path / "clean")


def test_a_loss_that_is_not_finite_is_skipped_and_counted(small, tmp_path, monkeypatch, caplog):
    poison(monkeypatch, 7)
    config = small("b", run__on_nonfinite="skip")
    assert pretrain(config, tmp_path / "run", ranks=CPU).step == 12
    found, _ = newest_checkpoint(tmp_path / "run")
    assert found is not None and read_state(found).skipped == 1
    assert all(weight.isfinite().all() for weight in weights_of(tmp_path / "run").values())
    (line,) = read_metrics(tmp_path / "run" / "metrics.jsonl", "nonfinite")
    assert line["step"] == 7
    assert "step 7: loss nan" in caplog.text


def test_other_samples_are_another_run(small, tmp_path):
    config = small("b", run__steps=2)
    pretrain(config, tmp_path / "run", ranks=CPU)
    (tmp_path / "text.txt").write_text("Quite another text. " * 500)
    prepare(tmp_path / "text.txt", tmp_path / "other", tokenizer="bytes", workers=1)
    other = config.with_overrides({"run.steps": 4, "data.folder": str(tmp_path / "other")})
    with pytest.raises(ValueError, match="other samples"):
        pretrain(other, tmp_path / "run", ranks=CPU, resume=True)


def test_what_cannot_change_cannot_change_from_python_either(small, tmp_path):
    pretrain(small("b", run__steps=2), tmp_path / "run", ranks=CPU)
    for config in (small("b", run__steps=4, optim__lr=0.5), small("a", run__steps=4)):
        with pytest.raises(ValueError, match="cannot change in a run that resumes"):
            pretrain(config, tmp_path / "run", ranks=CPU, resume=True)


def test_a_folder_holds_one_run(small, tmp_path):
    pretrain(small("b", run__steps=1), tmp_path / "run", ranks=CPU)
    with pytest.raises(ValueError, match=r"holds a run already; continue it with --resume"):
        pretrain(small("b"), tmp_path / "run", ranks=CPU)


def test_a_vocabulary_that_does_not_fit_is_refused(small, tmp_path):
    with pytest.raises(ValueError, match=r"vocabulary of 257; the model has 100: set model.vocab"):
        pretrain(small("b", model__vocab_size=100), tmp_path / "run", ranks=CPU)
    assert not (tmp_path / "run").exists()


def test_weight_decay_is_for_matrices_alone(small):
    model = LM(small("d").model)
    decayed, *free = make_optimizer(model, small("d").optim, CPU.device).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(parameter.dim() >= 2 for parameter in decayed["params"])
    free_names = {names[id(parameter)] for group in free for parameter in group["params"]}
    assert {"blocks.0.attention.ssmax.s", "blocks.0.attention.ssmax.bias"} <= free_names
    assert decayed["weight_decay"] == 0.1 and {group["weight_decay"] for group in free} == {0.0}
    assert len(decayed["params"]) + len(free_names) == len(names)


def test_accumulated_gradients_are_those_of_the_whole_batch(small):
    torch.manual_seed(0)
    model = LM(small("d").model).double()
    tokens = torch.randint(0, 257, (6, 17))
    targets = tokens[:, 1:].clone()
    targets[2, 3:] = IGNORE
    batch = Batch(inputs_BT=tokens[:, :-1], targets_BT=targets)
    parts = [
        Batch(inputs_BT=batch.inputs_BT[rows], targets_BT=targets[rows])
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    logits = model(batch.inputs_BT)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    loss = accumulate_gradients(Loss(model), parts, CPU, "float32")
    torch.testing.assert_close(loss, expected.float().detach(), rtol=1e-6, atol=1e-6)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-9)


def test_clipping_is_torchs_own(small):
    model = LM(small("b").model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    norm = clip_gradients(model, 1.0)
    torch.testing.assert_close(norm, before.norm())
    after = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.testing.assert_close(after, before / before.norm(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.94, 0.775, 0.55, 0.325, 0.16]),
        ("warmup-stable-decay", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.55]),
    ],
)
def test_the_learning_rate_over_eight_steps(kind, expected):
    from ssmax_lab.train.config import ScheduleConfig

    decay = {"decay_steps": 2} if kind == "warmup-stable-decay" else {}
    schedule = ScheduleConfig(
        kind=kind, warmup_steps=2, final=0.1 if kind != "constant" else 0.0, **decay
    )
    rates = [learning_rate(step, schedule, peak=1.0, steps=8) for step in range(8)]
    assert rates == pytest.approx(expected, abs=0.006)


def test_flops_are_six_for_every_weight_in_a_product(small):
    config = dataclasses.replace(small("a").model, train_length=2)
    model = LM(config)
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    weights -= model.embedding.weight.numel()
    attention = 12 * config.num_layers * config.hidden_size * 1.5
    assert flops_per_token(config) == (6 * weights, attention)


def test_metrics_shorter_than_its_checkpoint_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="holds 3 bytes, the checkpoint was written after 10"):
        MetricsWriter(tmp_path / "metrics.jsonl", mark=MetricsMark(bytes=10))


@pytest.mark.parametrize(("old", "new"), [(b'"lr": 0', b'"lr": 1'), (b'"loss"', b'"loss#')])
def test_metrics_that_were_changed_are_refused(small, tmp_path, old, new):
    run, other = tmp_path / "run", tmp_path / "other"
    pretrain(small("a", run__steps=4), run, ranks=CPU)
    path = run / "metrics.jsonl"
    whole = path.read_bytes()
    assert old in whole
    path.write_bytes(whole.replace(old, new, 1))
    longer = resumed_config(run, {"run.steps": 6})
    with pytest.raises(UsageError, match="metrics.jsonl was changed"):
        pretrain(longer, run, ranks=CPU, resume=True)
    with pytest.raises(UsageError, match="metrics.jsonl was changed"):
        branch(run, 4, other)
    assert not other.exists()
    path.write_bytes(whole)
    assert pretrain(longer, run, ranks=CPU, resume=True).step == 6


def test_a_line_cut_short_is_not_written_on(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"kind": "start"}\n{"kind": "che')
    events = MetricsWriter(tmp_path / "events.jsonl")
    events.append("start")
    events.close()
    assert read_metrics(tmp_path / "events.jsonl") == [{"kind": "start"}] * 2


def test_a_closed_terminal_is_a_request():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with graceful_shutdown() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.asked and interrupts.name == "SIGHUP"
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        # As nohup has it.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with graceful_shutdown() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupts.asked
    finally:
        signal.signal(signal.SIGHUP, before)
