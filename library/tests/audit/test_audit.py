"""The audit names every fault that is planted in a small model, and what it implies."""

import contextlib
import copy
import json
import sys

import pytest
import torch
import transformers
from small_llama import llama
from transformers.models.ministral3 import modeling_ministral3 as ministral3

import ssmax.hf
from audit_page import write_first_qwen
from ssmax import cli
from ssmax.audit import audit, write_small
from ssmax.audit.judging import Rows
from ssmax.audit.scales import find_scale
from ssmax.errors import UsageError
from ssmax.export import export

M, TOKENS, BETA = 64, 450, 0.5


def write_config(folder, config):
    folder.mkdir()
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Ministral 3 whose scale begins at position 64."""
    rope = {
        "rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": BETA,
        "original_max_position_embeddings": M,
    }  # fmt: skip
    config = transformers.Ministral3Config(rope_parameters=rope, max_position_embeddings=4096)
    home = tmp_path_factory.mktemp("ministral3")
    return write_small(write_config(home / "config", config), home / "small")


@torch.no_grad()
def rows_of(model, tokens):
    logprobs = model.eval()(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    best = logprobs.topk(20, -1)
    return Rows(version="planted", ids=best.indices, logprobs=best.values.double())


def stock(folder, tokens):
    """Transformers as it comes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return rows_of(model, tokens)


@contextlib.contextmanager
def scaled_by(function):
    """Ministral 3 with another function of positions."""
    own = ministral3.get_llama_4_attn_scale
    ministral3.get_llama_4_attn_scale = lambda positions, beta, length: function(
        own, positions, beta, length
    )
    try:
        yield
    finally:
        ministral3.get_llama_4_attn_scale = own


def planted(function):
    def run(folder, tokens):
        with scaled_by(function):
            return stock(folder, tokens)

    return run


def judged(folder, run, **options):
    options = {"tokens": TOKENS, **options}
    (verdict,) = audit(folder, engines={"planted": run}, **options).verdicts
    return verdict


def test_what_is_applied_is_said_to_be_applied(folder):
    found = audit(folder, engines={"stock": stock}, tokens=TOKENS)
    (verdict,) = found.verdicts
    assert found.is_applied and verdict.finding == "applied" and verdict.why == ""
    assert verdict.difference < 1e-3 < verdict.of_scale
    assert found.formula == "1 + 0.5 log(1 + floor((n - 1) / 64))" and found.begins == M


def test_what_is_dropped_is_said_to_be_dropped(folder):
    verdict = judged(folder, planted(lambda own, p, beta, length: own(p, 0.0, length)))
    assert verdict.finding == "dropped"
    # Where the first key is seen that it would have scaled, or soon after.
    assert M <= verdict.position < M + 8


FAULTS = {
    "positions begin at 1": (lambda own, p, b, m: own(p + 1, b, m), 63, (65, 128)),
    "positions begin at -1": (lambda own, p, b, m: own((p - 1).clamp_min(0), b, m), 64, None),
    "one n for all": (lambda own, p, b, m: own(torch.full_like(p, 449), b, m), 1, (449, 512)),
    "n restarts with each chunk of 128": (lambda own, p, b, m: own(p % 128, b, m), 128, None),
    "half the length": (lambda own, p, b, m: own(p, b, m // 2), 32, (65, 128)),
    "held at 200": (lambda own, p, b, m: own(p.clamp_max(200), b, m), 256, (193, 256)),
    "positions in bfloat16": (
        lambda own, p, b, m: own(p.bfloat16().float(), b, m),
        319,
        (321, 384),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_another_n_is_named_with_its_first_position(fault, folder):
    function, position, implied = FAULTS[fault]
    verdict = judged(folder, planted(function))
    assert verdict.finding == "another n", verdict
    assert (verdict.position, verdict.declared_n) == (position, position + 1)
    if implied is None:
        # The factor is 1 there, as it is without the scale.
        assert verdict.implied_n is None and "without the scale" in verdict.why
    else:
        low, high = verdict.implied_n
        # "One n for all" ends where the text does; the others at the edges of a step.
        assert low <= implied[0] <= high if fault == "one n for all" else (low, high) == implied


def test_what_no_scale_explains_is_not_comparable(folder):
    def turned(folder, tokens):
        config = transformers.AutoConfig.from_pretrained(folder)
        config.rope_parameters["rope_theta"] = 100.0
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config)
        return rows_of(model, tokens)

    verdict = judged(folder, turned)
    assert verdict.finding == "not comparable" and "no n explains it" in verdict.why


def test_a_few_positions_that_differ_by_themselves_hide_no_fault(folder):
    """As where a router of experts rounds to another one."""

    def run(folder, tokens):
        rows = planted(FAULTS["held at 200"][0])(folder, tokens)
        rows.logprobs[[10, 90]] += torch.linspace(-1, 1, 20).double()
        return rows

    verdict = judged(folder, run)
    assert (verdict.finding, verdict.position, verdict.implied_n) == ("another n", 256, (193, 256))

    def two(folder, tokens):
        rows = stock(folder, tokens)
        rows.logprobs[[10, 90]] += torch.linspace(-1, 1, 20).double()
        return rows

    verdict = judged(folder, two)
    assert verdict.finding == "applied" and "2 of 449" in verdict.why


def test_rows_that_say_nothing_are_not_comparable(folder):
    def broken(folder, tokens):
        rows = stock(folder, tokens)
        rows.logprobs[3, 0] = torch.nan
        return rows

    assert "NaN" in judged(folder, broken).why
    assert "rows" in judged(folder, lambda folder, tokens: stock(folder, tokens[:-1])).why
    # The prompt ends before the scale begins.
    verdict = judged(folder, stock, tokens=M)
    assert verdict.finding == "not comparable" and "too little" in verdict.why


def test_mistral_drops_a_scale_that_its_config_declares(folder, tmp_path):
    """A fault of others: the class MistralForCausalLM reads no such key."""
    model = ministral3.Ministral3ForCausalLM.from_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    scaling = {"beta": BETA, "original_max_position_embeddings": M}
    config = transformers.MistralConfig(
        **{k: v for k, v in values.items() if k not in ("model_type", "rope_parameters")},
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, llama_4_scaling=scaling,
    )  # fmt: skip
    config.architectures = ["MistralForCausalLM"]
    model.save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    assert judged(tmp_path, stock).finding == "dropped"


@pytest.mark.parametrize("kind", ["Llama4TextConfig", "Mistral4Config", "BeamConfig"])
def test_other_families_are_read_and_their_faults_named(kind, tmp_path):
    """Transformers' own code is right about the formula; without it the scale is dropped."""
    changes = {
        "Llama4TextConfig": {"floor_scale": M, "attn_scale": BETA},
        "Mistral4Config": {},
        "BeamConfig": {},
    }[kind]
    config = getattr(transformers, kind)(**changes)
    if kind == "Mistral4Config":
        config.rope_parameters |= {
            "original_max_position_embeddings": M, "llama_4_scaling_beta": BETA
        }  # fmt: skip
    small = write_small(write_config(tmp_path / "config", config), tmp_path / "small")
    values = json.loads((small / "config.json").read_text())
    scale = find_scale(values)

    def loaded():
        named = getattr(transformers, values["architectures"][0])
        return named.from_pretrained(small, dtype=torch.float32)

    found = judged(small, lambda folder, tokens: rows_of(loaded(), tokens))
    assert found.finding == "applied", found

    def without(folder, tokens):
        model = loaded()
        scale.switch_off(model)
        return rows_of(model, tokens)

    assert judged(small, without).finding == "dropped"


def qwen(tmp_path, **changes):
    """A first Qwen, out of a Qwen 2 with the same weights; returns both."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=2048,
        rms_norm_eps=1e-6, tie_word_embeddings=False,
    )  # fmt: skip
    twin = transformers.Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        twin.lm_head.weight.mul_(40)
        for layer in twin.model.layers:
            layer.self_attn.q_proj.weight.mul_(80)
            for part in "qkv":
                getattr(layer.self_attn, f"{part}_proj").bias.normal_(std=0.1)
    write_first_qwen(twin, tmp_path, seq_length=64, **changes)
    return twin


def test_the_log_n_of_qwen_is_read_by_its_key(tmp_path):
    twin = qwen(tmp_path)
    assert judged(tmp_path, lambda folder, tokens: rows_of(twin, tokens)).finding == "dropped"
    ssmax.hf.convert(twin, rule="clamp", train_length=64)
    assert judged(tmp_path, lambda folder, tokens: rows_of(twin, tokens)).finding == "applied"
    (tmp_path / "other").mkdir()
    qwen(tmp_path / "other", use_dynamic_ntk=True)
    with pytest.raises(UsageError, match="use_dynamic_ntk"):
        judged(tmp_path / "other", stock)


@pytest.mark.parametrize("rule", ["ssmax", "ssmax_bias"])
def test_converted_models_of_ours_are_audited(rule, tmp_path):
    model = llama(rule, max_position_embeddings=2048)
    model.save_pretrained(tmp_path / "model")

    def shifted(folder, tokens):
        other = copy.deepcopy(model)
        for layer in other.model.layers:
            scale = layer.self_attn.ssmax
            own = scale.forward
            scale.forward = lambda n, own=own: own(n + 1)
        return rows_of(other, tokens)

    def reverted(folder, tokens):
        return rows_of(ssmax.hf.revert(copy.deepcopy(model)), tokens)

    find = tmp_path / "model"
    assert judged(find, lambda folder, tokens: rows_of(model, tokens)).finding == "applied"
    assert judged(find, reverted).finding == "dropped"
    verdict = judged(find, shifted)
    assert (verdict.finding, verdict.position) == ("another n", 1)
    low, high = verdict.implied_n
    assert low <= 3 <= high <= 4


def test_what_is_exported_is_audited_in_another_process(tmp_path, capsys):
    """The command, by Transformers in a process of its own: its exit code and its JSON."""
    out = tmp_path / "out"
    export(llama(max_position_embeddings=2048), out, to="ministral")
    arguments = ["audit", str(out), "--engine", f"transformers={sys.executable}"]
    assert cli.run([*arguments, "--tokens", "300", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["verdicts"]
    assert (found["version"], found["finding"]) == (transformers.__version__, "applied")


def test_an_engine_that_does_not_run_the_model_is_not_comparable(folder, tmp_path, capsys):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ValueError: no such architecture' >&2\nexit 1\n")
    python.chmod(0o755)
    assert cli.run(["audit", str(folder), "--tokens", "200", "--engine", f"vllm={python}"]) == 1
    said = capsys.readouterr().out
    assert "not comparable" in said and "no such architecture" in said


def test_configs_without_a_scale_or_with_two_are_refused(tmp_path):
    plain = transformers.LlamaConfig().to_dict()
    with pytest.raises(UsageError, match="declares no scale"):
        find_scale(plain)
    steps = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
    other = {"beta": 0.2, "original_max_position_embeddings": 64}
    with pytest.raises(UsageError, match="differ"):
        find_scale({**plain, "rope_parameters": steps, "llama_4_scaling": other})
    same = {"beta": 0.1, "original_max_position_embeddings": 64}
    found = find_scale({**plain, "rope_parameters": steps, "llama_4_scaling": same})
    assert "rope_parameters and llama_4_scaling" in found.where
    for nothing in (
        {**plain, "rope_parameters": {**steps, "llama_4_scaling_beta": 0.0}},
        {**plain, "llama_4_scaling": {**same, "beta": 0}},
        transformers.Llama4TextConfig(attn_scale=0.0).to_dict(),
    ):
        with pytest.raises(UsageError, match="beta of 0 .* nothing to audit"):
            find_scale(nothing)
    off = transformers.Llama4TextConfig(attn_temperature_tuning=False).to_dict()
    with pytest.raises(UsageError, match="declares no scale"):
        find_scale(off)
    # Llama 4 counts n, Ministral 3 positions.
    llama4 = find_scale(transformers.Llama4TextConfig().to_dict())
    assert llama4.begins == 8191
    assert llama4.factor(None, torch.tensor([8191, 8192])).tolist()[0] == 1.0
    assert llama4.factor(None, torch.tensor([8191, 8192])).tolist()[1] > 1.06


def test_bad_usage_is_refused(folder, tmp_path):
    for options, message in (
        ({"engines": ["sglang"]}, "must be one of"),
        ({"engines": ["llama.cpp=/nowhere"]}, "cannot be run"),
        ({"engines": [f"llama.cpp={sys.executable}"]}, "gguf"),
        ({"tokens": 2}, "at least 3"),
        ({"max_length": 10}, "max_length"),
        ({"small": True, "gguf": "x.gguf"}, "leave one out"),
    ):
        with pytest.raises(UsageError, match=message):
            audit(folder, **options)
    with pytest.raises(UsageError, match=r"no config\.json"):
        audit(tmp_path)
