"""The door: what is written is checked, carded, whole or not there."""

import dataclasses
import json
import math
import sys

import pytest
import torch
from safetensors.torch import load_file
from small_llama import END, byte_bpe, llama
from tiny_models import build, randomise, tokens_of
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    GenerationConfig,
)

import ssmax.hf
from ssmax.export import export, exporting, forms, gguf_file, graph_of
from ssmax.export.checking import CHUNK, DECODED, Agreement, compare
from ssmax.export.folding import BETA, fold, llama_form
from ssmax.export.sessions import session
from ssmax.export.vocabulary import gguf_vocabulary
from ssmax.hf.hook import install

PROMPT = tokens_of(batch=1, length=150)[0].tolist()


@torch.no_grad()
@pytest.mark.parametrize("rule", ["ssmax", "ssmax_bias", "clamp", "softmax", "probe"])
def test_hf_keeps_every_rule(rule, tmp_path):
    model = llama(rule, train_length=256)
    done = export(model, tmp_path / "out", to="hf", prompt=PROMPT)
    loaded = ssmax.hf.from_pretrained(tmp_path / "out").eval()
    assert ssmax.hf.verify(loaded).layers == 2 and loaded.config.ssmax["rule"] == rule
    tokens = torch.tensor([PROMPT])
    difference = (loaded(tokens).logits - model(tokens).logits).abs().max().item()
    assert difference <= 2 * done.agreement.largest_difference + 1e-6


def test_hf_of_a_converted_model_of_any_family_comes_back_bit_for_bit(tmp_path):
    model = randomise(ssmax.hf.convert(build("qwen3")))
    assert export(model, tmp_path / "out", to="hf", prompt=PROMPT).agreement.same_choice == 1.0
    tokens = torch.tensor([PROMPT])
    loaded = ssmax.hf.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("family", ["t5", "bart", "bert"])
def test_what_continues_no_text_is_refused_by_all_forms_alike(family, tmp_path):
    """Named with what does work."""
    model = ssmax.hf.convert(build(family))
    for to in forms.FORMS:
        with pytest.raises(
            ValueError, match=r"is no causal language model.*save_remote_code"
        ) as caught:
            export(model, tmp_path / "out", to=to)
        assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"is no causal language model"):
        graph_of(model)
    ssmax.hf.save_remote_code(model, tmp_path / "code")
    assert ssmax.hf.verify(ssmax.hf.from_pretrained(tmp_path / "code")).layers == 2


def told_nothing(module, query, key, value, attention_mask, scaling=None, **_):
    """As an engine computes: no mask is handed over, it knows its own rows."""
    assert attention_mask is None
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


@torch.no_grad()
def test_hf_follows_the_contract_of_vllms_transformers_backend(tmp_path, monkeypatch):
    """AutoModel from the config with the code beside it, its own weights, positions, no mask."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "vllm", told_nothing)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    # The code beside the model hooks itself in, over ours; later tests are not to meet it.
    install()
    monkeypatch.setattr(AttentionInterface, "get_interface", AttentionInterface.get_interface)
    source = llama("ssmax_bias")
    export(source, tmp_path / "out", to="hf", prompt=PROMPT)
    config = AutoConfig.from_pretrained(tmp_path / "out", trust_remote_code=True)
    options = {"trust_remote_code": True, "attn_implementation": "vllm"}
    model = AutoModel.from_config(config, **options).eval()
    weights = load_file(tmp_path / "out" / "model.safetensors")
    head = weights.pop("lm_head.weight")
    model.load_state_dict({key.removeprefix("model."): x for key, x in weights.items()})
    tokens = torch.tensor([PROMPT])
    places = torch.arange(tokens.shape[1])[None]
    hidden = model(tokens, position_ids=places, use_cache=False).last_hidden_state
    torch.testing.assert_close(hidden @ head.t(), source(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rope", "train_length", "promised"),
    [
        ({}, 64, 150),
        ({}, 32, 64),  # the config says more than the training length: that stands
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 64, 64),
    ],
)
def test_an_engine_may_read_what_the_config_says_or_was_checked(
    rope, train_length, promised, tmp_path
):
    """Engines hold a folder to its config; types that compute with that number keep it."""
    model = llama(max_position_embeddings=64, train_length=train_length, **rope)
    export(model, tmp_path / "out", to="hf", prompt=PROMPT)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == promised
    assert model.config.max_position_embeddings == 64


@pytest.mark.parametrize("to", ["hf", "ministral"])
@pytest.mark.parametrize("end", [7, None])
def test_a_folder_of_transformers_says_which_token_ends_a_text(to, end, tmp_path):
    export(llama(eos_token_id=end), tmp_path / "out", to=to, prompt=PROMPT)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == end
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == end


@pytest.mark.parametrize("prompt", [1024, PROMPT])
def test_what_has_learned_few_positions_is_checked_on_as_many(prompt, tmp_path):
    model = randomise(ssmax.hf.convert(build("gpt2")))
    assert export(model, tmp_path / "out", to="hf", prompt=prompt).agreement.tokens == 128


@pytest.mark.parametrize("weights", forms.GGUF_WEIGHTS)
def test_a_gguf_holds_the_folded_weights_and_w_q_in_float32(weights, tmp_path):
    gguf = pytest.importorskip("gguf")
    model = llama()
    done = export(model, tmp_path / "out", to="gguf", weights=weights, prompt=PROMPT)
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    stored = {"float32": "F32", "bfloat16": "BF16", "q8_0": "Q8_0"}[weights]
    assert (kinds["blk.0.attn_q.weight"], kinds["blk.0.attn_k.weight"]) == ("F32", stored)
    scale = reader.get_field("mistral3.attention.temperature_scale").contents()
    length = reader.get_field("mistral3.rope.scaling.original_context_length").contents()
    assert (scale, length) == (BETA, 1)
    folded = fold(llama_form(model))
    read = gguf_file.read_weights(tmp_path / "out" / "model.gguf", folded.config)
    assert read.keys() == folded.weights.keys()
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(read[name], folded.weights[name])
    # llama.cpp turns neighbours together, Llama's layout the two halves of a head.
    stored = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.attn_q.weight")
    head = model.config.head_dim
    first, second = folded.weights[name][:head].chunk(2)
    assert torch.equal(torch.tensor(stored.data[0:head:2]), first)
    assert torch.equal(torch.tensor(stored.data[1:head:2]), second)
    assert f"gguf, {weights}" in (tmp_path / "out" / "README.md").read_text()
    # Narrow weights cost something, and it is measured.
    assert (done.agreement.largest_difference > 1e-2) == (weights != "float32")


def test_q8_0_refuses_rows_that_are_no_blocks(tmp_path):
    with pytest.raises(ValueError, match=r"in blocks, and .*down_proj.* has rows of 80.*bfloat"):
        export(llama(intermediate_size=80), tmp_path / "out", to="gguf", weights="q8_0")


def test_a_vocabulary_that_llama_cpp_would_cut_otherwise_is_left_out():
    small, config = byte_bpe().to_str(), {"vocab_size": 800, "eos_token_id": [0, 1]}
    found = gguf_vocabulary(small, config)
    assert found["pre"] == "smollm" and found["tokens"][found["end"]] == END
    assert len(found["tokens"]) == len(found["types"]) == 800
    values = json.loads(small)
    for changed in ({"normalizer": {"type": "NFC"}}, {"pre_tokenizer": {"type": "Whitespace"}}):
        assert gguf_vocabulary(json.dumps(values | changed), config) is None
    assert gguf_vocabulary(small, {**config, "eos_token_id": None}) is None


def test_what_disagrees_is_not_left_behind(tmp_path, monkeypatch):
    def forgets_the_last_layer(form, *, fit):
        form.s_LH[-1] = 0.5
        return fold(form, fit=fit)

    monkeypatch.setattr(exporting, "fold", forgets_the_last_layer)
    with pytest.raises(ValueError, match="differs from the source by .* tokens; rounding"):
        export(llama(), tmp_path / "out", to="ministral", prompt=PROMPT)
    assert list(tmp_path.iterdir()) == []


def test_nan_is_no_agreement_wherever_it_stands():
    tokens = torch.tensor([PROMPT])
    model = llama()
    inner = session(model)

    def starts_with_nan(piece):
        return inner(piece) * (math.nan if piece.shape[1] > 1 else 1.0)

    found = compare(session(model), starts_with_nan, tokens)
    with pytest.raises(ValueError, match="differs from the source by nan"):
        found.check(torch.float32)


@torch.no_grad()
def test_the_check_sees_every_position_in_chunks_and_then_one_by_one():
    model = llama()
    tokens = torch.randint(99, (1, CHUNK + 100), generator=torch.Generator().manual_seed(0))
    lengths, seen = [], []

    def watched(piece):
        lengths.append(piece.shape[1])
        return inner(piece)

    inner = session(model)
    found = compare(watched, session(model), tokens, lambda done, total: seen.append((done, total)))
    assert lengths == [1, CHUNK, 99 - DECODED, *[1] * DECODED]
    assert seen[-1] == (tokens.shape[1], tokens.shape[1])
    exact = dataclasses.asdict(found) | {"source_loss": 0, "exported_loss": 0, "largest_logit": 0}
    assert exact == dataclasses.asdict(
        Agreement(tokens=CHUNK + 100, decoded=DECODED, largest_difference=0.0, largest_logit=0,
                  same_choice=1.0, source_loss=0, exported_loss=0)
    )  # fmt: skip
    assert found.source_loss == found.exported_loss
    assert found.source_loss == pytest.approx(model(tokens, labels=tokens).loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "tflite"}, "to must be one of hf, ministral"),
        ({"to": "gguf", "weights": "q2"}, "weights must be one of float32"),
        ({"to": "onnx", "weights": "q8_0"}, "belongs to gguf"),
        ({"to": "hf", "fit": True}, "fit gives up the bias, which hf can keep"),
        ({"to": "hf", "prompt": [1]}, "at least 2 tokens"),
        ({"to": "hf", "prompt": [1, 99]}, "0..98, the prompt holds 1..99"),
    ],
)
def test_a_bad_choice_is_refused_before_anything_is_written(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        export(llama(), tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_not_touched(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ValueError, match="not an empty folder"):
        export(llama(), tmp_path, to="hf")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_empty_folder_may_be_where_one_is_or_behind_a_link(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "here")
    for folder in (".", tmp_path / "link"):
        export(llama(), folder, to="hf", prompt=PROMPT)
    for name in ("here", "real"):
        assert (tmp_path / name / "config.json").is_file()
    assert (tmp_path / "link").is_symlink()


def test_the_model_is_left_as_it_was(tmp_path):
    model = llama().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    export(model, tmp_path / "out", to="ministral", prompt=PROMPT)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
