"""The language model: its size, its caches, its generation, its probe."""

import copy
import itertools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ssmax.nn import RULES, KVCache
from ssmax.testing import assert_no_worse_than
from ssmax_lab.model import LM, LMConfig

TINY = LMConfig(
    num_layers=2,
    num_heads=4,
    hidden_size=32,
    intermediate_size=48,
    vocab_size=61,
    train_length=16,
    rule="ssmax",
)


def make(**changes) -> LM:
    torch.manual_seed(0)
    values = {**TINY.to_dict(), **changes}
    model = LM(LMConfig(**values)).double().eval()
    for name, parameter in model.named_parameters():
        # Large enough for attention to matter, so that a wrong n shows.
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
        elif name.endswith("ssmax.s"):
            torch.nn.init.uniform_(parameter, 0.3, 1.0)
    return model


def tokens(batch=2, length=11, seed=0):
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("softmax", 162_148_608),
        ("ssmax", 162_148_608 + 144),
        ("ssmax_no_s", 162_148_608),
        ("temperature", 162_148_608 + 144),
        ("ssmax_bias", 162_148_608 + 288),
        ("probe", 162_148_608 + 1_312),
    ],
)
def test_the_papers_model_has_the_papers_size(rule, expected):
    with torch.device("meta"):
        assert LM(LMConfig(rule=rule)).num_parameters == expected


@pytest.mark.parametrize("rule", RULES)
def test_a_model_can_be_built_as_shapes_alone(rule):
    with torch.device("meta"):
        model = LM(LMConfig(rule=rule, num_layers=1))
        losses = model.losses(torch.zeros(2, 9, dtype=torch.long))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert losses.is_meta and losses.shape == (2, 8)


@pytest.mark.parametrize("rule", ["ssmax", "ssmax_bias", "probe", "ssmax_no_s"])
def test_another_rule_keeps_every_other_weight(rule):
    """Configuration (e): softmax replaced after training."""
    model = make(rule="softmax")
    model.theta, model.residual_dtype = 500_000.0, torch.bfloat16
    state = torch.get_rng_state()
    other = model.with_rule(rule)
    assert torch.equal(torch.get_rng_state(), state)
    assert (other.config.rule, other.theta, other.training) == (rule, 500_000.0, model.training)
    assert other.residual_dtype is torch.bfloat16
    shared = dict(model.named_parameters())
    new = [name for name, _ in other.named_parameters() if name not in shared]
    assert all(".ssmax." in name or name.startswith("table.") for name in new)
    for name, parameter in other.named_parameters():
        if name in shared:
            assert torch.equal(parameter, shared[name])
            assert parameter.data_ptr() != shared[name].data_ptr()
    assert set(shared) <= {name for name, _ in other.named_parameters()}


def test_a_probe_replaced_by_a_probe_starts_anew():
    model = make(rule="probe")
    torch.nn.init.constant_(model.table.p, 3.0)
    torch.nn.init.constant_(model.blocks[0].attention.ssmax.s, 5.0)
    fresh = model.with_rule("probe")
    assert (fresh.table.p == 1.0).all() and (fresh.blocks[0].attention.ssmax.s == 1.0).all()
    assert torch.equal(fresh.head.weight, model.head.weight)


def test_the_default_is_table_1():
    config = LMConfig()
    assert (config.num_layers, config.num_heads, config.hidden_size) == (12, 12, 768)
    assert (config.intermediate_size, config.vocab_size, config.train_length) == (
        2048,
        50_257,
        1024,
    )
    assert config.theta == 10_000.0


def test_only_matrices_are_decayed():
    model = make(rule="probe")
    assert all(p.dim() == 1 for n, p in model.named_parameters() if "ssmax" in n or "table" in n)
    assert sum("table" in name for name in model.state_dict()) == 1


def test_a_fresh_model_predicts_nothing_yet():
    torch.manual_seed(0)
    model = LM(TINY)
    loss = torch.nn.functional.cross_entropy(
        model(tokens())[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()
    )
    assert loss.item() == pytest.approx(torch.tensor(61.0).log().item(), rel=0.05)


def test_a_token_sees_only_what_came_before():
    model, first = make(), tokens()
    second = first.clone()
    second[:, 7:] = (second[:, 7:] + 1) % 61
    assert torch.equal(model(first)[:, :7], model(second)[:, :7])
    assert not torch.allclose(model(first)[:, 7:], model(second)[:, 7:])


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_heads": 2, "qk_norm": True}, {"window": 5}, {"window": 5, "full_every": 2}],
    ids=str,
)
def test_any_split_into_chunks_gives_the_same_logits(rule, options):
    model, row = make(rule=rule, **options), tokens()
    whole = model(row)
    for cuts in ([0, 11], [0, 4, 5, 11], list(range(12))):
        cache = KVCache(model.config.num_layers)
        pieces = [model(row[:, a:b], cache=cache) for a, b in itertools.pairwise(cuts)]
        assert cache.length == 11
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-9, atol=1e-10)


def test_padding_and_packing_leave_each_row_as_it_is_alone():
    model, row = make(), tokens(1)
    alone = model(row[:, :7])
    padded = torch.nn.functional.pad(row[:, :7], (4, 0))
    keep = torch.tensor([[False] * 4 + [True] * 7])
    torch.testing.assert_close(
        model(padded, key_padding_mask=keep)[:, 4:], alone, rtol=1e-9, atol=1e-10
    )
    packed = model(row, cu_seqlens=torch.tensor([0, 7, 11], dtype=torch.int32))
    torch.testing.assert_close(packed[:, :7], alone, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(packed[:, 7:], model(row[:, 7:]), rtol=1e-9, atol=1e-10)


def full_forward_greedy(model, prompt, steps):
    """No cache, no padding, no batch: the reference of generation."""
    row = list(prompt)
    for _ in range(steps):
        row.append(model(torch.tensor([row]))[0, -1].argmax().item())
    return row[len(prompt) :]


@pytest.mark.parametrize("rule", ["softmax", "ssmax", "ssmax_bias"])
@pytest.mark.parametrize("window", [None, 6])
def test_generation_equals_the_full_forward_for_every_prompt_of_the_batch(rule, window):
    model = make(rule=rule, window=window)
    prompts = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 8, 7], [60, 0, 60, 0, 60]]
    generated = model.generate(prompts, 25)
    for prompt, new in zip(prompts, generated, strict=True):
        assert new == full_forward_greedy(model, prompt, 25)
        assert model.generate([prompt], 25) == [new]


def test_the_cached_logits_equal_the_full_forwards():
    model = make()
    prompts = [[5, 6], [1, 2, 3, 4, 5, 6, 7]]
    keep = torch.tensor([[False] * 5 + [True] * 2, [True] * 7])
    batch = torch.tensor([[0] * 5 + prompts[0], prompts[1]])
    cache = KVCache(2)
    logits = [model(batch, cache=cache, key_padding_mask=keep)[:, -1]]
    for token in (11, 12, 13):
        keep = torch.nn.functional.pad(keep, (0, 1), value=True)
        step = torch.full((2, 1), token)
        logits.append(model(step, cache=cache, key_padding_mask=keep)[:, -1])
        prompts = [[*prompt, token] for prompt in prompts]
        for row, prompt in enumerate(prompts):
            full = model(torch.tensor([prompt]))[0, -1]
            torch.testing.assert_close(logits[-1][row], full, rtol=1e-9, atol=1e-10)


def test_streaming_gives_each_step_and_stops_at_stop_tokens():
    model = make()
    whole = model.generate([[3, 4], [7]], 12)
    assert [list(step) for step in model.stream([[3, 4], [7]], 12)] == [
        list(pair) for pair in zip(*whole, strict=True)
    ]
    stop = whole[0][4]
    cut = model.generate([[3, 4], [7]], 12, stop_tokens=[stop])
    assert cut[0] == whole[0][: whole[0].index(stop)]
    expected = whole[1][: whole[1].index(stop)] if stop in whole[1] else whole[1]
    assert cut[1] == expected
    assert model.generate([[3, 4], [7]], 12, stop_tokens=torch.tensor([stop])) == cut
    assert model.generate([[3]], 0) == [[]]


def test_tokens_may_be_integers_of_any_width():
    model, tokens_BT = make(), tokens()
    assert torch.equal(model.losses(tokens_BT.int()), model.losses(tokens_BT))
    rows = tokens_BT.numpy().astype(np.uint16)
    assert model.generate(list(rows), 3) == model.generate(tokens_BT, 3)


def test_sampling_is_seeded_and_stays_within_the_likeliest():
    model = make()
    runs = [
        model.generate(
            [[3, 4]] * 3,
            8,
            temperature=0.9,
            top_k=5,
            top_p=0.8,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]
    assert model.generate([[3, 4]], 8, temperature=1.0, top_k=1) == model.generate([[3, 4]], 8)
    assert model.generate([[3, 4]], 8, temperature=1.0, top_p=1e-9) == model.generate([[3, 4]], 8)


def test_top_k_and_top_p_keep_what_they_say():
    from ssmax_lab.model.generation import keep_likeliest

    logits = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]).log()[:, [3, 0, 4, 1, 2]]
    assert keep_likeliest(logits, 2, None).isfinite().tolist() == [
        [False, True, False, True, False]
    ]
    assert keep_likeliest(logits, None, 0.6).isfinite().tolist() == [
        [False, True, False, True, False]
    ]
    assert keep_likeliest(logits, None, 0.71).isfinite().tolist() == [
        [False, True, False, True, True]
    ]
    assert keep_likeliest(logits, None, 1.0).isfinite().all()


def test_the_probe_sees_the_weights_that_attention_uses():
    model, row = make(), tokens()
    for layer, weights in enumerate(model.attention_rows(row, [-1, 3])):
        assert weights.shape == (2, 4, 2, 11)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 2).double())
        assert (weights[:, :, 1, 4:] == 0).all()
        attention = model.blocks[layer].attention
        if layer == 0:
            hidden = model.blocks[0].attention_norm(model.embedding(row))
            v = attention._heads(attention.v_proj(hidden))
            mixed = (weights @ v).transpose(1, 2).flatten(-2)
            torch.testing.assert_close(
                attention.o_proj(mixed)[:, 0], attention(hidden)[:, -1], rtol=1e-8, atol=1e-9
            )
    assert layer == 1


def test_theta_is_changeable_at_test_time():
    model, row = make(), tokens()
    before = model(row)
    model.theta = 500_000.0
    assert not torch.allclose(model(row), before)
    torch.testing.assert_close(model(row), make(theta=500_000.0)(row), rtol=0, atol=0)


def test_saving_keeps_every_bit(tmp_path):
    from ssmax_lab.model import load_lm, save_lm

    for rule in ("ssmax_bias", "probe", "softmax"):
        model = make(rule=rule).float()
        save_lm(model, tmp_path / rule)
        loaded = load_lm(tmp_path / rule)
        assert loaded.config == model.config
        assert torch.equal(loaded(tokens()), model(tokens()))
        half = load_lm(tmp_path / rule, dtype=torch.bfloat16)
        assert half.embedding.weight.dtype == torch.bfloat16
        assert all(p.dtype == torch.float32 for n, p in half.named_parameters() if ".ssmax." in n)
    assert "blocks.0.attention.ssmax.s" in load_file(tmp_path / "ssmax_bias" / "model.safetensors")


def test_saving_keeps_a_theta_that_was_changed(tmp_path):
    from ssmax_lab.model import load_lm, save_lm

    model = make().float()
    model.theta = 500_000.0
    save_lm(model, tmp_path)
    assert torch.equal(load_lm(tmp_path)(tokens()), model(tokens()))


def test_a_disk_that_takes_no_more_is_an_error_of_the_system(tmp_path, monkeypatch):
    import safetensors.torch

    from ssmax_lab.model import save_lm

    def full(weights, path):
        raise safetensors.SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match=r"model\.safetensors was not saved: No space left"):
        save_lm(make().float(), tmp_path)


def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path):
    import json

    from safetensors.torch import save_file

    from ssmax_lab.model import load_lm, save_lm

    with pytest.raises(ValueError, match="there is no folder"):
        load_lm(tmp_path / "nowhere")
    folder = tmp_path / "model"
    save_lm(make().float(), folder)
    config = json.loads((folder / "config.json").read_text())

    def rewrite(**changes):
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    rewrite(rule="softmax")
    with pytest.raises(ValueError, match=r"Unexpected .*blocks\.0\.attention\.ssmax\.s"):
        load_lm(folder)
    rewrite(rule="ssmax_bias")
    with pytest.raises(ValueError, match=r"Missing .*blocks\.0\.attention\.ssmax\.bias"):
        load_lm(folder)
    rewrite(intermediate_size=50)
    with pytest.raises(ValueError, match=r"blocks\.0\.ff\.gate\.weight.*\[48, 32\].*\[50, 32\]"):
        load_lm(folder)
    rewrite(num_layer=3)
    with pytest.raises(ValueError, match="unknown key 'num_layer'.*did you mean 'num_layers'"):
        load_lm(folder)
    rewrite(num_layers=None)
    with pytest.raises(ValueError, match="config.json is no model's configuration: "):
        load_lm(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="another model's"):
        load_lm(folder)
    rewrite(format="other")
    with pytest.raises(ValueError, match="another model's"):
        load_lm(folder)
    rewrite()
    weights = load_file(folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(ValueError, match="cannot be read"):
        load_lm(folder)
    save_file(weights, folder / "model.safetensors")
    assert load_lm(folder).config.rule == "ssmax"
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no model.safetensors"):
        load_lm(folder)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_with_softmax_it_is_transformers_llama(kv_heads):
    transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
    from ssmax_lab.model import to_llama_weights

    model = make(rule="softmax", num_kv_heads=kv_heads).float()
    weights, config = to_llama_weights(model)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    llama.load_state_dict(weights)
    row = tokens(2, 33)
    with torch.no_grad():
        torch.testing.assert_close(model(row), llama(row).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"rule": "ssmax"},
        {"qk_norm": True, "rule": "softmax"},
        {"window": 4, "rule": "softmax"},
        {"rotary_dim": 4, "rule": "softmax"},
    ],
    ids=str,
)
def test_what_llama_cannot_say_is_not_written_for_it(changes):
    from ssmax_lab.model import to_llama_weights

    with pytest.raises(ValueError, match="Llama"):
        to_llama_weights(make(**changes))


def test_importing_the_model_imports_no_transformers():
    import subprocess
    import sys

    code = "import ssmax_lab.model, sys; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


BAD = {
    "padding": (
        lambda: make()(tokens(2, 3), key_padding_mask=torch.ones(3, 3, dtype=torch.bool)),
        "key_padding_mask must have a row for each of the 2 rows of the batch, got 3",
    ),
    "no layers": (lambda: LMConfig(num_layers=0), "num_layers must be at least 1"),
    "unknown rule": (lambda: LMConfig(rule="ssmx"), "rule must be one of softmax"),
    "heads that do not divide": (lambda: LMConfig(hidden_size=770), "hidden_size must be a multiple"),
    "key heads that do not divide": (lambda: LMConfig(num_kv_heads=5), "multiple of num_kv_heads"),
    "odd rotary": (lambda: LMConfig(rotary_dim=3), "rotary_dim must be even"),
    "theta": (lambda: LMConfig(theta=0.0), "theta must be positive"),
    "length": (lambda: LMConfig(train_length=1), "train_length must be at least 2"),
    "dropout": (lambda: LMConfig(dropout_p=1.0), "dropout_p"),
    "float tokens": (lambda: make()(torch.rand(2, 3)), "tokens must be integers"),
    "flat tokens": (lambda: make()(torch.tensor([1, 2])), r"\(batch, tokens\)"),
    "no prompts": (lambda: make().generate([], 3), "at least one prompt"),
    "an empty prompt": (lambda: make().generate([[1], []], 3), "prompt 1 is empty"),
    "a token too large": (lambda: make().generate([[61]], 3), "Is it another tokenizer's"),
    "a token that is no number of one": (lambda: make().generate([[1.7]], 3), "tokens must be integers; prompt 0"),
    "temperature": (lambda: make().generate([[1]], 3, temperature=-1.0), "temperature must be"),
    "top_k": (lambda: make().generate([[1]], 3, top_k=0), "top_k must be at least 1"),
    "top_p": (lambda: make().generate([[1]], 3, top_p=0.0), "top_p must be above 0"),
    "max_new_tokens": (lambda: make().generate([[1]], -1), "max_new_tokens must be at least 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_clear_error(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_narrow_residual_stream_is_no_worse_than_a_narrow_model():
    torch.manual_seed(0)
    model = LM(LMConfig(num_layers=3, num_heads=2, hidden_size=32, intermediate_size=48, vocab_size=61,
                        train_length=24))  # fmt: skip
    tokens = torch.randint(0, 61, (2, 24))
    exact = copy.deepcopy(model).double().hidden(tokens)
    narrow = copy.deepcopy(model).to(torch.bfloat16).hidden(tokens)
    model.residual_dtype = torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = model.hidden(tokens)
    assert ours.dtype == torch.bfloat16
    assert_no_worse_than(ours, narrow, exact, slack=1.0)


def test_every_so_many_layers_see_everything_and_the_others_their_window():
    model = make(num_layers=4, window=3, full_every=2)
    tokens_BT = torch.arange(8).unsqueeze(0)
    for layer, weights in enumerate(model.attention_rows(tokens_BT, [7])):
        seen = (weights[0, :, 0] > 0).all(0).sum()
        assert seen == (8 if layer % 2 else 3)
    with pytest.raises(ValueError, match="full_every must be at least 2 and needs a window"):
        make(full_every=2)
