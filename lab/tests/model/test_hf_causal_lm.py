"""A model of Transformers answers the three questions as it would without parts and caches."""

import pytest
import torch
import transformers
from tiny_models import ENCODER, build, randomise, tokens_of

import ssmax.hf
from ssmax.hf.layers import learned_positions
from ssmax_lab.model.hf_causal_lm import HFCausalLM, check_memory, load_causal

FAMILIES = ["llama", "gpt2", "gemma3", "mistral"]


@pytest.fixture(params=[(name, c) for name in FAMILIES for c in (False, True)], ids=str)
def model(request):
    name, is_converted = request.param
    made = build(name)
    return randomise(ssmax.hf.convert(made, layers="all")) if is_converted else made


@pytest.fixture
def narrow(monkeypatch):
    """Parts that are shorter than the texts of these tests."""
    monkeypatch.setattr("ssmax_lab.model.hf_causal_lm.CHUNK", 7)


def test_losses_are_those_of_the_whole_logits(model, narrow):
    tokens = tokens_of(2, 30)
    with torch.no_grad():
        logits = model(tokens).logits
        exact = model.double()(tokens).logits[:, :-1].log_softmax(-1)
    wanted = -exact.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    model.float()
    eager = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none"
    )
    found = HFCausalLM(model).losses(tokens)
    assert found.shape == (2, 29) and found.dtype == torch.float32
    error = (found - wanted).abs().max()
    assert error <= 4 * (eager - wanted).abs().max() + 1e-6


def test_attention_rows_are_those_of_eager_code(model, narrow):
    tokens, rows = tokens_of(2, 30), [29, 0, 3, 17]
    found = list(HFCausalLM(model).attention_rows(tokens, rows))
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    with torch.no_grad():
        whole = model(tokens, output_attentions=True, use_cache=False).attentions
        exact = model.double()(tokens, output_attentions=True, use_cache=False).attentions
    for ours, theirs, wanted in zip(found, whole, exact, strict=True):
        assert ours.shape == (2, 4, 4, 30)
        error, budget = (
            (one - wanted[:, :, rows]).abs().max() for one in (ours, theirs[:, :, rows])
        )
        assert error <= 4 * budget + 1e-6


def test_attention_rows_are_chosen_as_those_of_a_list(model):
    tokens, subject = tokens_of(2, 9), HFCausalLM(model)
    for ours, last in zip(
        subject.attention_rows(tokens, [-1, torch.tensor(8)]),
        subject.attention_rows(tokens, [8]),
        strict=True,
    ):
        assert torch.equal(ours, last.expand_as(ours))
    with pytest.raises(IndexError):
        next(subject.attention_rows(tokens, [9]))


def test_generation_is_greedy_for_every_prompt_as_alone(model, narrow):
    prompts = [tokens_of(1, length, seed=length)[0].tolist() for length in (3, 12, 20)]
    subject = HFCausalLM(model)
    together = subject.generate(prompts, 5)
    for prompt, new in zip(prompts, together, strict=True):
        assert subject.generate([prompt], 5) == [new]
        tokens = list(prompt)
        for token in new:
            with torch.no_grad():
                assert int(model(torch.tensor([tokens])).logits[0, -1].argmax()) == token
            tokens.append(token)


def test_a_settings_file_of_the_model_does_not_change_what_is_measured():
    model = build("llama")
    prompts = [[5, 6, 7, 8]]
    wanted = HFCausalLM(model).generate(prompts, 6)
    model.generation_config.update(
        do_sample=True, temperature=5.0, repetition_penalty=9.0, num_beams=3
    )
    assert HFCausalLM(model).generate(prompts, 6) == wanted


def test_a_first_token_is_put_where_it_is_missing(narrow):
    model = build("llama")
    tokens = tokens_of(2, 20)
    begun = torch.nn.functional.pad(tokens, (1, 0), value=1)
    plain, subject = HFCausalLM(model), HFCausalLM(model, first=1)
    assert torch.equal(subject.losses(tokens), plain.losses(begun)[:, 1:])
    assert torch.equal(subject.losses(begun), plain.losses(begun))
    for ours, theirs in zip(
        subject.attention_rows(tokens, [4, 19]), plain.attention_rows(begun, [5, 20]), strict=True
    ):
        assert torch.equal(ours, theirs[..., 1:])
    prompt = tokens[0].tolist()
    assert subject.generate([prompt], 4) == plain.generate([[1, *prompt]], 4)


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(ValueError, match="BartForConditionalGeneration is no causal language"):
        HFCausalLM(build("bart"))
    with pytest.raises(ValueError, match="has learned 128 positions and cannot read 129 tokens"):
        HFCausalLM(build("gpt2")).losses(tokens_of(1, 129))


def roberta(length):
    shared = {**ENCODER, "pad_token_id": 1, "max_position_embeddings": length + 2}
    return transformers.RobertaForCausalLM(transformers.RobertaConfig(**shared, is_decoder=True))


def opt(length):
    shared = {key: ENCODER[key] for key in ("hidden_size", "num_attention_heads", "vocab_size")}
    sizes = {"num_hidden_layers": 1, "ffn_dim": 48, "word_embed_proj_dim": 32}
    config = transformers.OPTConfig(**shared, **sizes, max_position_embeddings=length)
    return transformers.OPTForCausalLM(config)


@torch.no_grad()
@pytest.mark.parametrize("make", [opt, roberta])
def test_rows_of_a_table_that_no_token_comes_to_are_no_positions(make):
    model = make(20).eval()
    assert learned_positions(model) == 20 and model(tokens_of(1, 20)).logits.isfinite().all()
    with pytest.raises((IndexError, RuntimeError)):
        model(tokens_of(1, 21))


def test_the_logits_of_a_long_text_are_never_there_at_once(monkeypatch):
    model = build("llama")
    widest = []
    forward = model.forward

    def watched(*arguments, **options):
        out = forward(*arguments, **options)
        widest.append(out.logits.shape[1])
        return out

    monkeypatch.setattr(model, "forward", watched)
    HFCausalLM(model).losses(tokens_of(1, 2500))
    assert widest == [1024, 1024, 451]


@torch.no_grad()
def test_a_model_is_loaded_with_its_s_from_wherever_it_is(tmp_path):
    base, tokens = build("llama"), tokens_of()
    base.save_pretrained(tmp_path / "base")
    plain = base(tokens).logits
    converted = randomise(ssmax.hf.convert(base))
    wanted = converted(tokens).logits
    converted.save_pretrained(tmp_path / "whole")
    ssmax.hf.save(converted, tmp_path / "adapter")
    ssmax.hf.save_remote_code(converted, tmp_path / "code")
    assert torch.equal(load_causal(tmp_path / "base")(tokens).logits, plain)
    for source, adapter in (("base", tmp_path / "adapter"), ("whole", None), ("code", None)):
        assert torch.equal(load_causal(tmp_path / source, adapter)(tokens).logits, wanted)
    with pytest.raises(ValueError, match="nowhere' cannot be loaded"):
        load_causal(tmp_path / "nowhere")


def test_a_context_that_no_memory_holds_is_refused():
    check_memory(build("llama"), 1024)
    with pytest.raises(ValueError, match="GiB for its keys and values"):
        check_memory(build("llama"), 10**12)
