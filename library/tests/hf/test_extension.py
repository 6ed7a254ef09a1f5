"""A model for longer contexts: its rotation, the scale of its queries, and the way back."""

import copy
import json
import math

import pytest
import torch
import transformers as tf
from tiny_models import MORE, SHARED, build

import ssmax.hf
from ssmax.cli import command
from ssmax.errors import UsageError
from ssmax.hf.extension import memory_shortfall

WIDE = {**SHARED, "hidden_size": 128}
"""Heads of 32: rotations that never make a full turn within 128 tokens."""
BASE = {"rope_type": "default", "rope_theta": 10_000.0}
TOKENS = torch.arange(300).remainder(90).view(1, -1) + 3


def llama(rope=None, **others):
    torch.manual_seed(0)
    config = tf.LlamaConfig(**{**WIDE, "rope_parameters": {**BASE, **(rope or {})}, **others})
    return boosted(tf.LlamaForCausalLM(config).eval())


def boosted(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "query_key_value")):
                parameter.mul_(10.0)
    return model


@torch.no_grad()
def logits(model):
    return model(TOKENS).logits


@pytest.mark.parametrize("sharpen", ["auto", "none", "clamp", "yarn", 1.2])
@pytest.mark.parametrize("positions", ["auto", "base", "yarn", "none"])
def test_an_extension_is_undone_bit_for_bit(positions, sharpen):
    model = llama()
    config, before = copy.deepcopy(model.config.to_dict()), logits(model)
    done = ssmax.hf.extend(model, 512, positions=positions, sharpen=sharpen)
    assert model.config.max_position_embeddings == done.to == 512
    changes_nothing = (positions, sharpen) == ("none", "none")
    assert torch.equal(logits(model), before) == changes_nothing
    assert ssmax.hf.revert(model) is model
    assert torch.equal(logits(model), before) and model.config.to_dict() == config
    with pytest.raises(UsageError, match="nothing to undo"):
        ssmax.hf.revert(model)


def test_the_base_is_raised_until_its_limit_is_the_context():
    done = ssmax.hf.extend(llama(), 512, positions="base", sharpen="none")
    of_base = [ssmax.rope_limit(128, 1e4, 32, base_factor=f) for f in (done.factor, 1.0)]
    assert [done.rope_limit, done.rope_limit_before] == pytest.approx(of_base, abs=0.1)
    assert 512 <= done.rope_limit < 1.02 * 512
    assert ssmax.rope_limit(128, 1e4, 32, base_factor=0.98 * done.factor) < 512


def test_it_is_the_model_that_a_config_with_these_rotations_makes():
    by_hand = {
        "base": lambda f: {"rope_theta": 1e4 * f},
        "yarn": lambda f: {"rope_type": "yarn", "factor": f,
                           "original_max_position_embeddings": 128, "attention_factor": 1.0},
    }  # fmt: skip
    for positions, rope in by_hand.items():
        model = llama()
        done = ssmax.hf.extend(model, 512, positions=positions, sharpen="clamp")
        twin = llama(rope(done.factor), max_position_embeddings=512)
        assert not torch.equal(logits(model), logits(twin))
        ssmax.hf.convert(twin, rule="clamp", train_length=128)
        assert torch.equal(logits(model), logits(twin))


def test_yarn_with_its_temperature_is_what_transformers_ships():
    model = llama()
    ssmax.hf.extend(model, 512, positions="yarn", sharpen="yarn")
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    twin = llama(rope, max_position_embeddings=512)
    assert torch.equal(logits(model), logits(twin))
    # Elsewhere it is a constant, the square of what query and key are multiplied by.
    done = ssmax.hf.extend(model := llama(), 512, positions="base", sharpen="yarn")
    twin = llama({"rope_theta": 1e4 * done.factor})
    ssmax.hf.convert(twin, rule="temperature")
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if ".ssmax." in name:
                parameter.fill_((0.1 * math.log(4) + 1) ** 2)
    assert torch.equal(logits(model), logits(twin))


def test_inside_the_trained_length_clamp_changes_nothing_but_the_rotation():
    model, plain = llama(), llama()
    for each, sharpen in ((model, "clamp"), (plain, "none")):
        ssmax.hf.extend(each, 512, positions="base", sharpen=sharpen)
    scaled, unscaled = logits(model), logits(plain)
    assert torch.equal(scaled[:, :128], unscaled[:, :128])
    assert not torch.equal(scaled[:, 160:], unscaled[:, 160:])


@pytest.mark.parametrize("sharpen", ["clamp", 1.2])
@pytest.mark.parametrize("positions", ["base", "yarn"])
def test_what_is_saved_is_what_is_loaded(tmp_path, positions, sharpen):
    model = llama()
    ssmax.hf.extend(model, 512, positions=positions, sharpen=sharpen)
    assert ssmax.hf.verify(model).layers == 2
    wanted = logits(model)
    model.save_pretrained(tmp_path / "whole")
    ssmax.hf.save(model, tmp_path / "adapter")
    ssmax.hf.save_remote_code(model, tmp_path / "code")
    whole = ssmax.hf.from_pretrained(tmp_path / "whole")
    adapted = ssmax.hf.load(llama(), tmp_path / "adapter")
    theirs = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "code", trust_remote_code=True)
    for found in (whole, adapted, theirs):
        assert torch.equal(logits(found), wanted)
        assert found.config.max_position_embeddings == 512
    for found in (whole, adapted):
        assert torch.equal(logits(ssmax.hf.revert(found)), logits(llama()))
    with pytest.raises(UsageError, match="extended already"):
        extended = llama()
        ssmax.hf.extend(extended, 512, sharpen="none")
        ssmax.hf.load(extended, tmp_path / "adapter")


def test_without_a_scale_it_is_a_plain_model(tmp_path):
    model = llama()
    ssmax.hf.extend(model, 512, positions="yarn", sharpen="yarn")
    model.save_pretrained(tmp_path)
    plain = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(plain), logits(model))
    assert torch.equal(logits(ssmax.hf.revert(plain)), logits(llama()))


def test_it_generates_what_it_would_without_a_cache():
    model = llama()
    ssmax.hf.extend(model, 512, sharpen="clamp")
    mask = torch.ones_like(TOKENS)
    said = model.generate(
        TOKENS, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    for new in range(TOKENS.shape[1], said.shape[1]):
        assert model(said[:, :new]).logits[0, -1].argmax() == said[0, new]


def test_a_model_with_an_s_of_its_own_keeps_it_alone():
    model = ssmax.hf.convert(llama(), rule="ssmax", init="paper", train_length=128)
    done = ssmax.hf.extend(model, 512)
    assert (done.positions, done.sharpen) == ("base", "none")
    twin = ssmax.hf.convert(
        llama({"rope_theta": 1e4 * done.factor}), rule="ssmax", init="paper", train_length=128
    )
    assert torch.equal(logits(model), logits(twin))
    with pytest.raises(UsageError, match="converted already"):
        ssmax.hf.extend(
            ssmax.hf.convert(llama(), rule="ssmax", init="paper", train_length=128),
            512, sharpen="clamp",
        )  # fmt: skip


LLAMA3 = {
    "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("rope", "positions"),
    [({"rope_type": "linear", "factor": 2.0}, "base"), (LLAMA3, "base"), (YARN, "base"),
     (YARN, "yarn")],
    ids=["linear", "llama3", "yarn, base", "yarn, factor"],
)  # fmt: skip
def test_rotations_that_are_scaled_already_are_scaled_on(rope, positions):
    model = llama(rope)
    before, scaling = logits(model), model.model.rotary_emb.attention_scaling
    trained = model.model.rotary_emb.inv_freq.clone()
    done = ssmax.hf.extend(model, 512, positions=positions, sharpen="none", train_length=128)
    assert done.rope_limit_before == pytest.approx(128, abs=0.1) and done.rope_limit >= 511.9
    # No pair that made less than a turn shows an angle at 512 that it had not shown at 128.
    slow = trained * 128 < math.tau
    now = model.model.rotary_emb.inv_freq
    assert bool((now * 511.9 <= trained * 128)[slow].all())
    assert model.model.rotary_emb.attention_scaling == scaling
    assert torch.equal(logits(ssmax.hf.revert(model)), before)


def test_of_partial_rotations_the_rotated_channels_count():
    config = tf.GPTNeoXConfig(
        **{key: value for key, value in WIDE.items() if key != "num_key_value_heads"},
        rope_parameters={**BASE, "partial_rotary_factor": 0.5},
    )
    done = ssmax.hf.extend(tf.GPTNeoXForCausalLM(config), 512, positions="base")
    assert done.rope_limit == pytest.approx(
        ssmax.rope_limit(128, 1e4, 16, base_factor=done.factor), abs=0.1
    )


def test_layers_with_windows_keep_their_rotation_and_their_queries():
    torch.manual_seed(0)
    model = MORE["gemma3_mixed"]().eval()
    sliding = copy.deepcopy(model.config.rope_parameters["sliding_attention"])
    tables = model.model.rotary_emb.sliding_attention_inv_freq.clone()
    full = model.model.rotary_emb.full_attention_inv_freq.clone()
    done = ssmax.hf.extend(model, 512, positions="base", sharpen="clamp")
    assert model.config.rope_parameters["sliding_attention"] == sliding
    assert torch.equal(model.model.rotary_emb.sliding_attention_inv_freq, tables)
    assert done.positions == "base"
    assert not torch.equal(model.model.rotary_emb.full_attention_inv_freq, full)
    assert model.config.ssmax["layers"] == ["model.layers.1.self_attn"]
    ssmax.hf.verify(model)


def test_a_rotation_that_carries_already_stays():
    # Each of its four pairs makes a full turn within 128 tokens.
    model = build("llama")
    model.config.rope_parameters["rope_theta"] = 20.0
    model = tf.LlamaForCausalLM(model.config)
    done = ssmax.hf.extend(model, 512, sharpen="clamp")
    assert (done.positions, done.rope_limit) == ("none", None)


def one_window():
    config = tf.Qwen2Config(
        **WIDE, sliding_window=16, use_sliding_window=True, max_window_layers=1,
        rope_parameters=BASE,
    )  # fmt: skip
    return tf.Qwen2ForCausalLM(config)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONG = {
    "rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "factor": 2.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (llama, {"to": 64}, "not longer than the 128 tokens"),
        (llama, {"to": 10**12}, "no RoPE base carries"),
        (llama, {"to": 512.5}, "whole number"),
        (llama, {"to": 512, "positions": "ntk"}, "positions must be one of"),
        (llama, {"to": 512, "sharpen": "ssmax"}, "sharpen must be one of"),
        (llama, {"to": 512, "sharpen": -1.0}, "sharpen must be one of"),
        (lambda: build("gpt2"), {"to": 512}, "no rotary positions"),
        (lambda: build("mistral"), {"to": 512}, "all attention layers .* have a window"),
        (one_window, {"to": 512}, "share one rotation"),
        (lambda: llama(DYNAMIC), {"to": 512}, "'dynamic'"),
        (lambda: llama(LONG), {"to": 512}, "'longrope'"),
        (lambda: llama(YARN), {"to": 512}, "train_length"),
        (lambda: llama(LLAMA3), {"to": 512, "positions": "yarn"}, "of type llama3"),
        (lambda: llama(max_position_embeddings=512), {"to": 512, "train_length": 512}, "longer"),
        (lambda: torch.nn.Linear(2, 2), {"to": 512}, "takes a model of Transformers"),
    ],
)
def test_what_cannot_be_extended_says_so_and_stays(model, options, message):
    model = model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = copy.deepcopy(getattr(model, "config", None))
    with pytest.raises(UsageError, match=message):
        ssmax.hf.extend(model, **options)
    assert set(model.state_dict()) == set(before)
    if config is not None:
        assert model.config.to_dict() == config.to_dict()


def test_windows_beside_a_shared_rotation_allow_a_scale_alone():
    model = one_window()
    done = ssmax.hf.extend(model, 512, positions="none", sharpen="clamp")
    assert done.positions == "none" and len(model.config.ssmax["layers"]) == 1


def test_once_is_enough():
    model = llama()
    ssmax.hf.extend(model, 512, sharpen="none")
    with pytest.raises(UsageError, match="extended already"):
        ssmax.hf.extend(model, 1024)


@pytest.mark.filterwarnings("ignore:torch.*deprecated")
def test_a_quantised_base_is_extended():
    from test_saving import quantise

    model = quantise(llama())
    before = logits(model)
    ssmax.hf.extend(model, 512, sharpen="clamp")
    ssmax.hf.verify(model)
    assert not torch.equal(logits(model), before)
    assert torch.equal(logits(ssmax.hf.revert(model)), before)


def test_engines_without_s_get_a_constant_and_refuse_what_they_cannot(tmp_path):
    from ssmax.export import export

    model = llama()
    ssmax.hf.extend(model, 512, positions="base", sharpen=1.2)
    wanted = logits(model)
    export(model, tmp_path / "out", to="ministral")
    found = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(found), wanted, rtol=1e-4, atol=1e-4)
    for sharpen, positions, message in (("clamp", "base", "'clamp'"), (1.2, "yarn", "'yarn'")):
        model = llama()
        ssmax.hf.extend(model, 512, positions=positions, sharpen=sharpen)
        with pytest.raises(UsageError, match=message):
            export(model, tmp_path / "no", to="ministral")


def test_a_context_that_no_memory_holds_is_told_with_its_size():
    model, here = llama(), torch.device("cpu")
    assert memory_shortfall(model, 1024, here) is None
    # Two layers, two key heads of 32 numbers of four bytes: 1,024 bytes a token.
    lack = memory_shortfall(model, 2**40, here)
    assert lack is not None and f"take {2**20:,} GiB" in lack
    # A layer with a window keeps few keys.
    lack = memory_shortfall(MORE["gemma3_mixed"](), 2**40, here)
    assert lack is not None and "take 131,072 GiB" in lack


def run(*arguments):
    return command.run("ssmax.cli.app", [str(each) for each in arguments], "ssmax")


def test_the_command_writes_a_folder_and_names_what_comes_next(tmp_path, capsys, monkeypatch):
    llama().save_pretrained(tmp_path / "base")
    (tmp_path / "base/tokenizer_config.json").write_text(json.dumps({"model_max_length": 128}))
    out = tmp_path / "out"
    assert run("extend", tmp_path / "base", out, "--to", 512, "--sharpen", "clamp") == 0
    said = capsys.readouterr().out
    assert "128 to 512" in said and f"ssmax-lab evaluate --hf {tmp_path / 'base'} {out}" in said
    wanted = llama()
    ssmax.hf.extend(wanted, 512, sharpen="clamp")
    assert torch.equal(logits(ssmax.hf.from_pretrained(out)), logits(wanted))
    assert run("extend", tmp_path / "base", tmp_path / "a", "--to", 512, "--adapter",
               "--sharpen", 1.2, "--json") == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out)["sharpen"] == "1.2"
    ssmax.hf.load(llama(), tmp_path / "a")
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    assert run("extend", tmp_path / "base", tmp_path / "large", "--to", 512) == 0
    assert "keys and values of 512 tokens" in capsys.readouterr().err
    assert run("extend", tmp_path / "base", out, "--to", 512) == 2
    assert run("extend", tmp_path / "base", tmp_path / "b", "--to", 64) == 2
    assert run("extend", tmp_path / "base", tmp_path / "b", "--to", 512, "--adapter",
               "--sharpen", "none") == 2  # fmt: skip
    assert not (tmp_path / "b").exists()
