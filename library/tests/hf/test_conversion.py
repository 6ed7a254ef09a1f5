"""Converted models: the same until trained, n right whoever calls, undone without a trace."""

import builtins
import copy
import functools
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from tiny_models import BART, CAUSAL, GPT2, OTHERS, SHARED, build, inputs_of, randomise, tokens_of
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ssmax.hf
from ssmax.hf.conversion import Conversion
from ssmax.hf.hook import watched
from ssmax.hf.layers import own_scale, window_of
from ssmax.hf.verification import audited
from ssmax.nn import RULES
from ssmax.ops.visible import Ramp

EVERY = [*CAUSAL, *OTHERS]
# What the compiler imports is not ours.
NO_NOISE = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def left_padded(lengths=(11, 6)):
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, -length:] = 1
    return mask


@torch.no_grad()
@pytest.mark.parametrize("name", EVERY)
def test_identity_changes_no_bit_and_revert_leaves_no_trace(name):
    model = build(name)
    inputs = inputs_of(model, tokens_of(), left_padded())
    before = model(**inputs).logits
    keys = set(model.state_dict())
    ssmax.hf.convert(model, layers="all", attention="all")
    assert torch.equal(model(**inputs).logits, before)
    assert ssmax.hf.verify(model).layers == len(Conversion.of(model).layers) > 0
    randomise(model)
    assert not torch.allclose(model(**inputs).logits, before, atol=1e-4)
    assert ssmax.hf.revert(model) is model
    assert torch.equal(model(**inputs).logits, before)
    assert set(model.state_dict()) == keys and not hasattr(model.config, "ssmax")


@torch.no_grad()
def test_other_models_in_the_process_are_as_before():
    model, other = build("llama"), build("llama")
    tokens = tokens_of()
    before = other(input_ids=tokens).logits
    randomise(ssmax.hf.convert(model))
    assert torch.equal(other(input_ids=tokens).logits, before)


def test_a_copy_is_converted_too():
    model = randomise(ssmax.hf.convert(build("llama")))
    copied = copy.deepcopy(model)
    tokens = tokens_of()
    with torch.no_grad():
        assert torch.equal(copied(input_ids=tokens).logits, model(input_ids=tokens).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_s_and_b_stay_float32(dtype):
    model = randomise(ssmax.hf.convert(build("llama"))).to(dtype)
    assert model.lm_head.weight.dtype == dtype
    scale = model.model.layers[0].self_attn.ssmax
    assert scale.s.dtype == scale.bias.dtype == torch.float32
    with torch.no_grad():
        assert model(input_ids=tokens_of()).logits.isfinite().all()


def test_gradients_reach_s_and_b_at_once():
    model = ssmax.hf.convert(build("llama"))
    tokens = tokens_of()
    model(input_ids=tokens, labels=tokens).loss.backward()
    for name, parameter in model.named_parameters():
        if ".ssmax." in name:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


@NO_NOISE
@torch.no_grad()
def test_the_graph_is_whole_and_serves_every_length():
    from torch._dynamo.testing import CompileCounter

    model = randomise(ssmax.hf.convert(build("llama")))
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(model.forward, backend=counter, fullgraph=True, dynamic=True)
    for length in (8, 12, 17, 31):
        tokens = tokens_of(2, length)
        out = compiled(input_ids=tokens, use_cache=False).logits
        torch.testing.assert_close(out, model(input_ids=tokens, use_cache=False).logits)
    assert counter.frame_count == 1


def test_which_layers():
    gemma = build("gemma3")
    names = [name for name, _ in gemma.named_modules() if name.endswith("self_attn")]
    chosen = ssmax.hf.convert(gemma, layers=lambda name, module: ".0." in name).config.ssmax
    assert chosen["layers"] == names[:1]
    ssmax.hf.revert(gemma)
    assert len(ssmax.hf.convert(gemma, layers="all").config.ssmax["layers"]) == 2
    bart = ssmax.hf.convert(build("bart"))
    assert all(
        "decoder" in name and "encoder_attn" not in name for name in bart.config.ssmax["layers"]
    )
    bart = ssmax.hf.convert(build("bart"), attention="all")
    assert len(bart.config.ssmax["layers"]) == 6
    bert = ssmax.hf.convert(build("bert"))
    assert len(bert.config.ssmax["layers"]) == 2


@torch.no_grad()
@pytest.mark.parametrize("rule", [name for name in RULES if RULES[name].starts_as_softmax])
def test_rules_that_start_as_softmax(rule):
    model = build("llama")
    before = model(input_ids=tokens_of()).logits
    ssmax.hf.convert(model, rule=rule, train_length=64)
    torch.testing.assert_close(model(input_ids=tokens_of()).logits, before, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("rule", ["clamp", "yarn", "llama4", "ministral3"])
def test_rules_that_are_softmax_up_to_a_length_take_identity(rule, tmp_path):
    before = build("llama")(tokens_of()).logits
    model = ssmax.hf.convert(build("llama"), rule=rule, train_length=4)
    wanted = model(tokens_of()).logits
    assert torch.equal(wanted[:, :3], before[:, :3])
    assert not torch.allclose(wanted[:, 5:], before[:, 5:], atol=1e-4)
    assert ssmax.hf.verify(model).layers == 2
    model.save_pretrained(tmp_path / "whole")
    ssmax.hf.save(model, tmp_path / "adapter")
    for each in (
        ssmax.hf.from_pretrained(tmp_path / "whole"),
        ssmax.hf.load(build("llama"), tmp_path / "adapter"),
    ):
        assert Conversion.of(each) == Conversion.of(model)
        assert torch.equal(each.eval()(tokens_of()).logits, wanted)


def test_a_length_that_nobody_gave_is_not_shown(tmp_path):
    shown = "(ssmax): HookedScale(4, rule='ssmax_bias')"
    model = ssmax.hf.convert(build("llama"))
    model.save_pretrained(tmp_path)
    assert shown in str(model) and shown in str(ssmax.hf.from_pretrained(tmp_path))
    assert "train_length=8" in str(ssmax.hf.convert(build("llama"), train_length=8))
    # Whoever makes weights on no device and fills them later asks for first values in between.
    model.model.layers[0].self_attn.ssmax.reset_parameters()


LLAMA4 = {
    "hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48, "vocab_size": 99,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "num_local_experts": 2, "no_rope_layers": [1, 0], "attention_chunk_size": 4, "floor_scale": 4,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": 4}


def llama4(**options):
    return tf.Llama4ForCausalLM(tf.Llama4TextConfig(**LLAMA4, **options))


def ministral3(beta):
    rope = {**ROPE, "llama_4_scaling_beta": beta}
    return tf.Ministral3ForCausalLM(tf.Ministral3Config(**SHARED, rope_parameters=rope, head_dim=8))


@pytest.mark.parametrize(
    ("scaled", "plain", "message"),
    [
        (
            llama4, lambda: llama4(attn_temperature_tuning=False),
            r"model.layers.1.self_attn: the query is scaled .*attn_temperature_tuning=False",
        ),
        (
            lambda: ministral3(0.3), lambda: ministral3(0.0),
            r"0.self_attn, model.layers.1.self_attn: .*\['llama_4_scaling_beta'\] = 0",
        ),
    ],
)  # fmt: skip
@torch.no_grad()
def test_a_model_that_scales_its_queries_already_is_told_of(scaled, plain, message):
    with pytest.warns(UserWarning, match=message) as told:
        model = ssmax.hf.convert(scaled())
    assert len(told) == 1 and told[0].filename == __file__
    assert ssmax.hf.verify(model).layers == len(Conversion.of(model).layers)
    # What turns it off turns it off: there SSMax is alone, and nothing is told.
    model.load_state_dict(ssmax.hf.convert(alone := plain()).state_dict())
    far = tokens_of(1, 12)
    assert not torch.equal(model.eval()(far).logits, alone.eval()(far).logits)


def test_beams_layers_without_rotation_are_told_of():
    """Made by hand: the family needs a Transformers of its own time."""

    class BeamAttention(torch.nn.Module):
        config = SimpleNamespace(
            layer_types=["sliding", "full"], rope_parameters={"sliding": {}, "full": None}
        )

        def __init__(self, layer_idx):
            super().__init__()
            self.layer_idx = layer_idx

        def forward(self, attention_scaling=None):
            """Read, and never called."""

    assert own_scale(BeamAttention(0)) == ""
    assert "cannot be turned off" in own_scale(BeamAttention(1))


@torch.no_grad()
def test_paper_and_clamp_start_where_they_say():
    model = ssmax.hf.convert(build("llama"), init="paper", train_length=1024)
    scale = model.model.layers[0].self_attn.ssmax
    assert scale.rule == "ssmax" and scale.s[0].item() == pytest.approx(0.1685, abs=1e-4)
    plain = build("llama")
    before = plain(input_ids=tokens_of(1, 20)).logits
    clamped = ssmax.hf.convert(plain, rule="clamp", train_length=10)
    after = clamped(input_ids=tokens_of(1, 20)).logits
    assert torch.equal(after[:, :10], before[:, :10])
    assert not torch.allclose(after[:, 11:], before[:, 11:], atol=1e-4)
    assert not [name for name, _ in clamped.named_parameters() if ".ssmax." in name]


def test_anneal_leads_from_identity_to_the_paper():
    model = ssmax.hf.convert(build("llama"), init="anneal", train_length=1024)
    scale = model.model.layers[0].self_attn.ssmax
    with torch.no_grad():
        scale.s += 0.01  # what training did meanwhile
    for step in range(10):
        ssmax.hf.anneal(model, (step + 1) / 10, step / 10)
    assert scale.s[0].item() == pytest.approx(0.1685 + 0.01, abs=1e-4)
    assert scale.bias[0].item() == pytest.approx(0.0, abs=1e-5)


@torch.no_grad()
def test_a_watcher_sees_n_of_every_layer():
    model = randomise(ssmax.hf.convert(build("mistral"), layers="all"))
    seen = []
    with watched(lambda module, n, *_: seen.append(n.flatten().tolist())):
        model(input_ids=tokens_of(1, 8))
    assert seen == [[1, 2, 3, 4, 5, 6, 6, 6]] * 2
    model(input_ids=tokens_of(1, 8))
    assert len(seen) == 2


def test_verify_finds_a_layer_that_is_not_reached():
    model = ssmax.hf.convert(build("llama"))
    layer = model.model.layers[1]
    layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ValueError, match=r"1 of 2 .*'model.layers.1.self_attn'.* interface"):
        ssmax.hf.verify(model)


def test_verify_names_layers_that_the_inputs_do_not_lead_to():
    model = ssmax.hf.convert(tf.BartForCausalLM(tf.BartConfig(**BART)).eval(), attention="all")
    tokens = {"input_ids": tokens_of(1, 12)}
    for inputs, what in ((None, "tokens alone"), (tokens, "these inputs")):
        with pytest.raises(ValueError, match=f"2 of 4 .*0.encoder_attn': {what} do not lead there"):
            ssmax.hf.verify(model, inputs)
    read = {**tokens, "encoder_hidden_states": torch.randn(1, 9, 32)}
    assert ssmax.hf.verify(model, read).layers == 4
    layer = model.model.decoder.layers[1]
    layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ValueError, match=r"1 of 4 .*1.self_attn'.* interface"):
        ssmax.hf.verify(model, read)


@pytest.mark.parametrize(
    "make",
    [
        lambda **more: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2, **more)),
        lambda **more: tf.DecisionTransformerModel(
            tf.DecisionTransformerConfig(**GPT2, hidden_size=32, **more)
        ),
    ],
    ids=["gpt2", "decision transformer"],
)
def test_eager_code_that_passes_the_interface_by_is_refused(make):
    model = make(reorder_and_upcast_attn=True)
    with pytest.raises(
        ValueError, match=r"h.0.attn .* load the model with reorder_and_upcast_attn"
    ):
        ssmax.hf.convert(model)
    assert not hasattr(model.config, "ssmax")
    ssmax.hf.convert(make())


def prefix_mask(length=12, seen_at_once=5):
    """(1, 1, T, T): causal, but for the first few, which see each other."""
    place = torch.arange(length)
    return ((place <= place[:, None]) | (place < seen_at_once))[None, None]


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("padding", [0, 3])
def test_n_is_what_eager_code_weighs_though_its_mask_may_say_more(name, padding):
    """GPT-2's of Transformers 5.1 hides what is ahead by itself."""
    model = randomise(ssmax.hf.convert(build(name)))
    model.set_attn_implementation("eager")
    seen = prefix_mask() & (torch.arange(12) >= padding)
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    compared = []

    def audit(module, num_keys, key, weighed_BHQ):
        wanted = weighed_BHQ[:, :1, padding:]
        compared.append(num_keys.unsqueeze(1)[..., padding:].tolist() == wanted.tolist())

    with watched(audited(audit)):
        model(tokens_of(1, 12), attention_mask=mask, use_cache=False)
    assert compared == [True, True]


@torch.no_grad()
@pytest.mark.parametrize(("low", "n"), [(-150.0, 4), (-4e3, 4), (-6e3, 3), (-1e4, 3)])
def test_a_number_that_leaves_no_weight_hides_below_minus_5e3_alone(low, n):
    """As docs/convert.md says of a caller's own mask."""
    model = ssmax.hf.convert(build("llama"))
    model.set_attn_implementation("eager")
    mask = torch.zeros(1, 1, 4, 4)
    mask[..., 1:, 0] = low
    told = []
    with watched(lambda module, num_keys, *_: told.append(num_keys[0, -1].item())):
        out = model(tokens_of(1, 4), attention_mask=mask, output_attentions=True)
    weights = [layer[0, :, -1, 0].max().item() for layer in out.attentions]
    assert told == [n, n] and weights == [0.0, 0.0]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eager", "flex_attention"])
def test_booleans_are_refused_where_they_would_be_added(kind):
    model = randomise(ssmax.hf.convert(build("llama")))
    tokens, mask = tokens_of(1, 12), prefix_mask()
    model(tokens, attention_mask=mask)
    model.config._attn_implementation = kind
    with pytest.raises(ValueError, match=r"boolean mask.*\(1, 1, 12, 12\).*sdpa"):
        model(tokens, attention_mask=mask)


def test_verify_finds_a_count_that_is_wrong(monkeypatch):
    from ssmax.hf import hook

    model = ssmax.hf.convert(build("llama"))
    real = hook.count_keys
    monkeypatch.setattr(hook, "count_keys", lambda *a, **_: real(*a) + 1)
    with pytest.raises(ValueError, match=r"counts n = \[2, 3"):
        ssmax.hf.verify(model)


def test_verify_reads_one_more_token_behind_a_cache_of_the_others():
    model, seen = ssmax.hf.convert(build("llama")), []
    with watched(lambda module, n, *_: seen.append(n.flatten().tolist())):
        ssmax.hf.verify(model)
    assert seen[-2:] == [[13]] * 2


def test_verify_finds_a_step_of_decoding_that_is_taken_for_another(monkeypatch):
    model = ssmax.hf.convert(build("llama"))

    def keys(*asked, **_):
        return Ramp(asked[3].shape[2], asked[3].shape[2])

    monkeypatch.setattr("ssmax.hf.hook.count_keys", keys)
    with pytest.raises(ValueError, match=r"counts n = \[12, 12"):
        ssmax.hf.verify(model)


def test_a_config_that_models_share_tells_of_one_conversion():
    import transformers as tf

    config = build("llama").config
    one, two = (tf.LlamaForCausalLM(config).eval() for _ in range(2))
    ssmax.hf.convert(one)
    with pytest.raises(ValueError, match="is not converted"):
        ssmax.hf.verify(two)
    with pytest.raises(ValueError, match="is not converted"):
        ssmax.hf.freeze_all_but_ssmax(two)
    # The second would write its conversion over the first's, and take it away on its way back.
    with pytest.raises(ValueError, match="another model's too has to be copied"):
        ssmax.hf.convert(two, rule="clamp", train_length=8)
    ssmax.hf.revert(one)
    assert ssmax.hf.verify(ssmax.hf.convert(two)).layers == 2


def test_verify_finds_an_ssmax_that_was_lost():
    model = ssmax.hf.convert(build("llama"))
    del model.model.layers[1].self_attn.ssmax
    with pytest.raises(ValueError, match="model.layers.1.self_attn"):
        ssmax.hf.verify(model)


@pytest.mark.parametrize(
    ("mask", "options", "wanted"),
    [
        (None, {}, [2, 3, 3, 3, 3, 2]),
        ([[0, 0, 0, 1, 1, 1]], {}, [2, 3, 2]),
        (
            None,
            {"cu_seq_lens_q": [0, 3, 6], "cu_seq_lens_k": [0, 3, 6],
             "max_length_q": 3, "max_length_k": 3},
            [2, 3, 2, 2, 3, 2],
        ),
    ],
)  # fmt: skip
def test_two_way_windows_of_flash_attention_count_within_their_document(mask, options, wanted):
    from ssmax.hf.masks import count_keys

    module = torch.nn.Module()
    module.is_causal = False
    x = torch.zeros(1, 1, 6, 2)
    options = {key: torch.tensor(value, dtype=torch.int32) for key, value in options.items()}
    given = None if mask is None else torch.tensor(mask)
    found = count_keys("flash", module, x, x, given, {"sliding_window": 2, **options})
    assert found.flatten().tolist()[-len(wanted) :] == wanted


def test_bounds_of_flash_attention_go_through_all_rows_of_a_batch():
    from ssmax.hf.masks import count_keys

    module, x = torch.nn.Module(), torch.zeros(2, 1, 5, 2)
    # The second document is in both rows.
    bounds = torch.tensor([0, 2, 7, 10], dtype=torch.int32)
    options = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds,
               "max_length_q": 5, "max_length_k": 5}  # fmt: skip
    for causal, wanted in (
        (True, [[1, 2, 1, 2, 3], [4, 5, 1, 2, 3]]),
        (False, [[2, 2, 5, 5, 5], [5, 5, 3, 3, 3]]),
    ):
        module.is_causal = causal
        assert count_keys("flash", module, x, x, None, options).tolist() == wanted


def test_threads_that_convert_at_once_install_one_hook(monkeypatch):
    from transformers.modeling_utils import AttentionInterface

    from ssmax.hf import hook

    hooks, plain_import = [], builtins.__import__

    def slow_import(name, *arguments):
        if name == "transformers.modeling_utils":
            hooks.append(name)
            time.sleep(0.05)
        return plain_import(name, *arguments)

    # Undone at the end, with what is installed here.
    monkeypatch.setattr(AttentionInterface, "get_interface", None)
    monkeypatch.setattr(
        hook, "_install_attention", functools.cache(hook._install_attention.__wrapped__)
    )
    monkeypatch.setattr(builtins, "__import__", slow_import)
    threads = [threading.Thread(target=hook.install) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(hooks) == 1


@pytest.mark.parametrize(
    ("dtype", "own"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]
)
def test_s_is_as_wide_as_its_model_and_never_narrower_than_float32(dtype, own):
    scale = ssmax.hf.convert(build("llama").to(dtype)).model.layers[0].self_attn.ssmax
    assert scale.s.dtype == scale.bias.dtype == own


@torch.no_grad()
@pytest.mark.parametrize("rule", sorted(set(RULES) - {"probe"}))
def test_a_decoding_step_stays_on_the_device_of_its_query(rule):
    """The meta device, like a GPU, refuses what lies elsewhere; the probe looks at values."""
    model = ssmax.hf.convert(build("llama"), rule=rule, init="paper", train_length=8).to("meta")
    tokens = tokens_of().to("meta")
    cache = model(tokens).past_key_values
    assert model(tokens[:, :1], past_key_values=cache).logits.is_meta


@torch.no_grad()
@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_decoding_step_has_the_factor_of_the_full_forward(rule):
    model = ssmax.hf.convert(build("llama"), rule=rule, init="paper", train_length=4).double()
    with warnings.catch_warnings(action="ignore"):  # the probe's table ends at 4
        whole = model(tokens_of()).logits[:, -1:]
        cache = model(tokens_of()[:, :-1]).past_key_values
        step = model(tokens_of()[:, -1:], past_key_values=cache).logits
    torch.testing.assert_close(step, whole, rtol=1e-9, atol=1e-7)


def test_chunks_are_no_full_attention():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = tf.Llama4TextConfig(
        hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, num_hidden_layers=2,
        vocab_size=99, num_local_experts=2, attention_chunk_size=4,
        layer_types=["chunked_attention", "full_attention"], **heads,
    )  # fmt: skip
    model = tf.Llama4ForCausalLM(config)
    assert Conversion.of(ssmax.hf.convert(model)).layers == ("model.layers.1.self_attn",)
    ssmax.hf.revert(model)
    assert len(Conversion.of(ssmax.hf.convert(model, layers="all")).layers) == 2


@pytest.mark.parametrize(("length", "floor"), [(None, 8192), (16, 16)])
def test_rules_that_grow_in_steps_begin_at_a_length(tmp_path, length, floor):
    model = ssmax.hf.convert(build("llama"), rule="llama4", init="paper", train_length=length)
    model.save_pretrained(tmp_path)
    for each in (model, ssmax.hf.from_pretrained(tmp_path)):
        scale = each.model.layers[0].self_attn.ssmax
        assert scale.floor_length == floor
        assert (scale(floor - 1) == 1).all() and (scale(floor) > 1).all()


@NO_NOISE
@torch.no_grad()
def test_layers_that_are_wrapped_one_by_one(tmp_path):
    model = build("llama")
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    with pytest.raises(ValueError, match="or a part of it, is compiled already"):
        ssmax.hf.convert(model)
    model = randomise(ssmax.hf.convert(build("llama")))
    wanted = model(tokens_of()).logits
    layers = model.model.layers
    layers[0], layers[1] = checkpoint_wrapper(layers[0]), torch.compile(layers[1], backend="eager")
    assert ssmax.hf.verify(model).layers == 2
    ssmax.hf.save(model, tmp_path)
    torch.testing.assert_close(ssmax.hf.load(build("llama"), tmp_path)(tokens_of()).logits, wanted)


IS_SLIDING = {
    "exaone4": "Exaone4Attention",
    "exaone4_5": "Exaone4_5_Attention",
    "exaone_moe": "ExaoneMoeAttention",
    "kolibri1": "Kolibri1Attention",
    "muse_glimmer_assistant": "MuseGlimmerAssistantAttention",
}


@pytest.mark.parametrize("family", IS_SLIDING)
def test_a_layer_that_does_not_use_its_window_is_full_attention(family):
    """These keep config.sliding_window on every layer and tell by is_sliding which use it."""
    modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    config = tf.CONFIG_MAPPING[family]()
    config = getattr(config, "text_config", config)
    config.sliding_window, config.layer_types = 6, ["sliding_attention", "full_attention"]
    with torch.device("meta"):
        layers = [getattr(modeling, IS_SLIDING[family])(config, layer_idx=i) for i in (0, 1)]
    assert [window_of(layer) for layer in layers] == [6, None]


def test_exaone_4_is_converted_where_it_has_full_attention():
    kinds = ["sliding_attention", "full_attention"]
    config = tf.Exaone4Config(**SHARED, head_dim=8, sliding_window=6, layer_types=kinds)
    model = ssmax.hf.convert(tf.Exaone4ForCausalLM(config).eval())
    assert Conversion.of(model).layers == ("model.layers.1.self_attn",)
    assert ssmax.hf.verify(model).layers == 1
