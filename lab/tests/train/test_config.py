"""A configuration is born valid: every bad one is refused with one line that helps."""

import dataclasses
import json

import pytest

from ssmax_lab import cli
from ssmax_lab.configurations import CONFIGURATIONS
from ssmax_lab.train.config import (
    TrainConfig,
    flat,
    read_config_file,
    read_overrides,
)
from ssmax_lab.train.recipes import (
    PRETRAINING,
    configured,
    finetuning_of,
    paper,
    quick,
    small,
)

# key, value, what the message must say
BAD = [
    ("optim.lrr", "1", "did you mean 'optim.lr'"),
    ("optim.learning_rate", "1", "unknown key"),
    ("lr", "1", "unknown key 'lr'"),
    ("run.batchsize", "1", "did you mean 'run.batch_size'"),
    ("model.heads", "1", "model.num_heads"),
    ("optim.lr", "0", "optim.lr must be positive, got 0"),
    ("optim.lr", "-1e-3", "optim.lr must be positive"),
    ("optim.lr", "nan", "optim.lr must be positive, got nan"),
    ("optim.lr", "inf", "optim.lr must be positive"),
    ("optim.lr", "fast", "optim.lr must be float, got 'fast'"),
    ("optim.beta1", "1.0", "optim.beta1 must be at least 0 and below 1"),
    ("optim.beta2", "-0.1", "optim.beta2"),
    ("optim.eps", "0", "optim.eps must be positive"),
    ("optim.weight_decay", "-1", "optim.weight_decay must be at least 0"),
    ("optim.max_grad_norm", "-1", "optim.max_grad_norm must be at least 0"),
    ("schedule.kind", "linear", "constant, cosine, warmup-stable-decay, got 'linear'"),
    ("schedule.warmup_steps", "-1", "schedule.warmup_steps must be at least 0"),
    ("schedule.warmup_steps", "1.5", "schedule.warmup_steps must be int, got '1.5'"),
    ("schedule.decay_steps", "10", "belongs to kind 'warmup-stable-decay'"),
    ("schedule.final", "2", "schedule.final must be from 0 to 1"),
    ("switch.rule", "hardmax", "switch.rule must be one of softmax"),
    ("switch.last_fraction", "0", "switch.last_fraction must be between 0 and 1"),
    ("switch.last_fraction", "1", "switch.last_fraction must be between 0 and 1"),
    ("switch.rule", "softmax", "switch.rule must differ from model.rule"),
    ("run.steps", "0", "run.steps must be at least 1, got 0"),
    ("run.steps", "many", "run.steps must be int, got 'many'"),
    ("run.steps", "", "run.steps must be int"),
    ("run.batch_size", "0", "run.batch_size must be at least 1"),
    ("run.micro_batch", "-4", "run.micro_batch must be at least 1"),
    ("run.precision", "float16", "run.precision must be one of float32, bfloat16"),
    ("run.residual", "narrow", "run.residual must be one of float32, bfloat16"),
    (
        "run.activation_memory_budget",
        "1.5",
        "run.activation_memory_budget must be between 0 and 1, got 1.5",
    ),
    ("run.compile", "yes", "run.compile must be bool, got 'yes'"),
    ("run.compile", 1, "run.compile must be bool, got 1"),
    ("run.parallel", "pipeline", "run.parallel must be one of ddp, fsdp2"),
    ("run.checkpoint_every", "0", "run.checkpoint_every must be at least 1"),
    ("run.keep_checkpoints", "0", "run.keep_checkpoints must be at least 1"),
    ("run.validate_every", "0", "run.validate_every must be at least 1"),
    ("run.scale_every", "0", "run.scale_every must be at least 1"),
    ("run.metrics_every", "0", "run.metrics_every must be at least 1"),
    ("run.on_nonfinite", "ignore", "run.on_nonfinite must be one of stop, skip"),
    ("data.validation_windows", "-1", "data.validation_windows must be at least 0"),
    ("data.seed", "1.5", "data.seed must be int"),
    ("data.folder", 3, "data.folder must be str, got 3"),
    ("model.rule", "sparsemax", "rule must be one of softmax"),
    ("model.num_layers", "0", "model.num_layers must be at least 1"),
    ("model.hidden_size", "100", "model.hidden_size must be a multiple of num_heads"),
    ("model.num_kv_heads", "5", "num_heads must be a multiple of num_kv_heads"),
    ("model.num_kv_heads", "some", "model.num_kv_heads must be int or none"),
    ("model.theta", "0", "model.theta must be positive"),
    ("model.train_length", "1", "model.train_length must be at least 2"),
    ("model.dropout_p", "1", "model.dropout_p must be at least 0 and below 1"),
    ("model.vocab_size", "0", "model.vocab_size must be at least 1"),
    ("model.num_kv_heads", "0", "model.num_kv_heads must be at least 1 or none, got 0"),
    ("model.head_dim", "0", "model.head_dim must be at least 1 or none"),
    ("model.window", "0", "model.window must be at least 1 or none"),
    ("model.norm_eps", "-1", "model.norm_eps must be positive and finite"),
    ("model.theta", "inf", "model.theta must be positive and finite"),
    ("run.seed", "99999999999999999999999", "run.seed must be from 0 to 2**63 - 1"),
    ("data.seed", "-1", "data.seed must be from 0"),
    ("schedule.kind", "warmup-stable-decay", "schedule.decay_steps must be at least 1"),
]


@pytest.mark.parametrize(("key", "value", "message"), BAD, ids=lambda x: str(x)[:30])
def test_a_bad_value_is_refused_in_one_line(key, value, message, capsys):
    with pytest.raises(ValueError) as error:
        TrainConfig().with_overrides({key: value})
    assert message in str(error.value)
    if isinstance(value, str):
        command = ["pretrain", "--preset", "paper", "--config", "a", "--data", "nowhere"]
        assert cli.run([*command, "--set", f"{key}={value}"]) == 2
        assert capsys.readouterr().err == f"ssmax-lab: {error.value}\n"


def test_the_defaults_are_the_papers_table_2():
    config = paper()
    assert config.tokens_per_step == 2_097_152
    assert (config.optim.beta1, config.optim.beta2, config.optim.weight_decay) == (0.9, 0.95, 0.1)
    assert (config.optim.lr, config.schedule.kind, config.schedule.warmup_steps) == (
        6e-4,
        "constant",
        1000,
    )
    assert (config.optim.max_grad_norm, config.model.theta, config.model.dropout_p) == (
        1.0,
        10_000.0,
        0.0,
    )
    assert config.run.precision == "bfloat16"


def test_fine_tuning_is_the_papers_table_3():
    config = finetuning_of(paper(), rows=1693, overrides={})
    assert config.run.batch_size * config.model.train_length == 131_072
    assert (config.optim.beta1, config.optim.beta2, config.optim.weight_decay) == (0.9, 0.999, 0.0)
    assert (config.optim.lr, config.schedule.kind, config.schedule.final) == (2e-5, "cosine", 0.0)
    assert config.schedule.warmup_steps == 14  # one epoch
    assert config.run.steps == 140


def test_epochs_of_fine_tuning_follow_the_batch_size():
    overrides = {"run.batch_size": "10"}
    config = finetuning_of(paper(), rows=96, overrides=overrides)
    assert (config.run.steps, config.schedule.warmup_steps) == (100, 10)


@pytest.mark.parametrize("name", PRETRAINING)
def test_a_recipe_survives_its_file(name):
    config = PRETRAINING[name]()
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


TRAINED = {name: one for name, one in CONFIGURATIONS.items() if one.is_pretrained}


@pytest.mark.parametrize("name", TRAINED)
def test_every_configuration_lies_over_every_recipe(name):
    for make in PRETRAINING.values():
        config = configured(make(), name)
        assert config.model.rule == ("softmax" if name == "f" else TRAINED[name].rule)
        assert config.switch.rule == ("ssmax" if name == "f" else "")
        assert flat(config.to_dict()).items() >= TRAINED[name].settings.items()


def test_sharper_softmax_and_faster_scales_change_that_alone():
    base = small()
    assert configured(base, "gain_2").model == dataclasses.replace(base.model, query_gain=2.3)
    fast, usual = configured(base, "b_fast"), configured(base, "b")
    assert fast == dataclasses.replace(usual, optim=fast.optim)
    assert fast.optim == dataclasses.replace(usual.optim, scale_lr=10.0)


def test_configuration_f_switches_for_the_last_eighth():
    config = configured(paper(), "f")
    assert config.switch_step == 175_000
    assert configured(paper(), "a").switch_step == 200_000
    later = configured(paper().with_overrides({"switch.last_fraction": 0.5}), "f")
    assert later.switch.rule == "ssmax" and later.switch_step == 100_000


def test_configuration_e_is_not_trained():
    with pytest.raises(ValueError, match="train a"):
        configured(quick(), "e")
    with pytest.raises(ValueError, match=r"config must be one of a, b, .* got 'g'"):
        configured(quick(), "g")


def test_texts_are_read_as_their_fields():
    overrides = read_overrides(
        ["run.steps=1e3", "run.batch_size=200_000", "run.compile=false", "model.num_kv_heads=none"]
    )
    config = TrainConfig().with_overrides(overrides)
    assert (config.run.steps, config.run.batch_size) == (1000, 200_000)
    assert config.run.compile is False
    assert config.model.num_kv_heads is None
    # Past 2**53 a float would be its neighbour.
    assert TrainConfig().with_overrides({"run.seed": "9007199254740993"}).run.seed == 2**53 + 1
    assert TrainConfig().with_overrides({"model.num_kv_heads": "4"}).model.num_kv_heads == 4


def test_what_is_valid_only_together_is_given_together():
    overrides = {"schedule.kind": "warmup-stable-decay", "schedule.decay_steps": "10"}
    assert TrainConfig().with_overrides(overrides).schedule.decay_steps == 10


@pytest.mark.parametrize("text", ["optim.lr", "=3", "optim.lr 3"])
def test_an_override_is_a_key_and_a_value(text):
    with pytest.raises(ValueError, match="key=value"):
        read_overrides([text])


def test_files_of_settings(tmp_path):
    (tmp_path / "a.toml").write_text("[optim]\nlr = 1e-3\n[run]\nsteps = 5\n")
    (tmp_path / "a.json").write_text('{"optim": {"lr": 1e-3}, "run.steps": 5}')
    for name in ("a.toml", "a.json"):
        assert read_config_file(tmp_path / name) == {"optim.lr": 1e-3, "run.steps": 5}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "optim = [", "cannot be read"),
        ("a.json", "{", "cannot be read"),
        ("a.json", "3", "must hold sections"),
        ("a.yaml", "a: 1", ".toml or .json"),
        ("a.toml", "[optimizer]\nlr = 1", "unknown section 'optimizer'; did you mean 'optim'"),
        ("a.toml", b"\xff\xfe", "cannot be read"),
    ],
)
def test_bad_files_of_settings(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_config_file(path)
    with pytest.raises(ValueError, match="there is no file"):
        read_config_file(tmp_path / "nowhere.toml")
