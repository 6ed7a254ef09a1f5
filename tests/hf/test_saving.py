"""Nothing is lost silently: adapters, whole checkpoints, and what is missing in them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import build, inputs_of, randomise, tokens_of

import ssmax.hf


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "bart"])
def test_an_adapter_is_a_few_kilobytes_for_any_base(name, tmp_path):
    model = randomise(ssmax.hf.convert(build(name), attention="all"))
    ssmax.hf.save(model, tmp_path / "adapter")
    size = sum(path.stat().st_size for path in (tmp_path / "adapter").iterdir())
    assert size < 8_000
    loaded = ssmax.hf.load(build(name), tmp_path / "adapter")
    inputs = inputs_of(model, tokens_of())
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    assert loaded.config.ssmax == model.config.ssmax


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "bart", "qwen3"])
def test_a_whole_checkpoint_comes_back_bit_for_bit(name, tmp_path):
    model = randomise(ssmax.hf.convert(build(name)))
    model.save_pretrained(tmp_path)
    loaded = ssmax.hf.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model)
    inputs = inputs_of(model, tokens_of())
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    ssmax.hf.verify(loaded)
    # And again, from what was loaded.
    loaded.save_pretrained(tmp_path / "again")
    again = ssmax.hf.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)


def test_in_bfloat16_s_stays_float32(tmp_path):
    model = randomise(ssmax.hf.convert(build("llama")))
    model.save_pretrained(tmp_path)
    loaded = ssmax.hf.from_pretrained(tmp_path, dtype=torch.bfloat16)
    scale = loaded.model.layers[0].self_attn.ssmax.scale
    assert loaded.lm_head.weight.dtype == torch.bfloat16 and scale.dtype == torch.float32
    assert torch.equal(scale, model.model.layers[0].self_attn.ssmax.scale)


def test_what_lacks_an_s_is_refused_by_its_name(tmp_path):
    model = randomise(ssmax.hf.convert(build("llama")))
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.ssmax.scale"
    without = {key: value for key, value in weights.items() if key != name}
    save_file(without, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks {name}"):
        ssmax.hf.from_pretrained(tmp_path)


def test_a_plain_model_is_no_converted_one(tmp_path):
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no converted model"):
        ssmax.hf.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no adapter"):
        ssmax.hf.load(build("llama"), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(next(iter(w))), "lacks"),
        (lambda w: w.update(more=torch.zeros(4)), "has too many: more"),
        (lambda w: w.update({next(iter(w)): torch.zeros(7)}), r"\(7,\) instead of \(4,\)"),
    ],
)
def test_an_adapter_that_does_not_fit_is_named_and_leaves_no_trace(tmp_path, change, message):
    ssmax.hf.save(ssmax.hf.convert(build("llama")), tmp_path)
    weights = load_file(tmp_path / "ssmax.safetensors")
    change(weights)
    save_file(weights, tmp_path / "ssmax.safetensors")
    base = build("llama")
    with pytest.raises(ValueError, match=message):
        ssmax.hf.load(base, tmp_path)
    assert not hasattr(base.config, "ssmax")
    ssmax.hf.convert(base)


def test_a_record_with_unknown_fields_is_refused(tmp_path):
    ssmax.hf.save(ssmax.hf.convert(build("llama")), tmp_path)
    values = json.loads((tmp_path / "ssmax.json").read_text())
    (tmp_path / "ssmax.json").write_text(json.dumps({**values, "shape": "round"}))
    with pytest.raises(ValueError, match=r"other fields: \['shape'\]"):
        ssmax.hf.load(build("llama"), tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("suffix", ["ssmax_scale", "softmax_scaler"])
def test_an_s_of_another_name_is_taken_over(tmp_path, suffix):
    ours = randomise(ssmax.hf.convert(build("llama"), init="paper", train_length=64))
    base = build("llama")
    base.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name, tensor in ssmax.hf.adapter.ssmax_tensors(ours).items():
        weights[name.replace("ssmax.scale", suffix)] = tensor
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    adopted = ssmax.hf.adopt(base, tmp_path)
    tokens = tokens_of()
    assert torch.equal(adopted(input_ids=tokens).logits, ours(input_ids=tokens).logits)


def test_an_s_that_nobody_can_read_is_refused(tmp_path):
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="carries no s by any name"):
        ssmax.hf.adopt(build("llama"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.ssmax_s"] = torch.ones(4)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"Step-5's model.layers.0.self_attn.ssmax_s: no public"):
        ssmax.hf.adopt(build("llama"), tmp_path)
    with pytest.raises(ValueError, match="holds no .safetensors"):
        ssmax.hf.adopt(build("llama"), tmp_path / "nowhere")


def test_an_s_without_a_place_leaves_no_trace(tmp_path):
    base = build("llama")
    for weights, message in (
        ({"model.layers.9.self_attn.ssmax_scale": torch.ones(4)}, "no attention layer"),
        ({"model.layers.0.self_attn.ssmax_scale": torch.ones(3)}, r"\(3,\) instead of \(4,\)"),
    ):
        save_file(weights, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            ssmax.hf.adopt(base, tmp_path)
        assert not hasattr(base.config, "ssmax")


@torch.no_grad()
def test_the_command_line_converts(tmp_path, capsys):
    from ssmax.cli import app

    base = build("llama")
    base.save_pretrained(tmp_path / "base")
    typed = ["convert", str(tmp_path / "base")]
    assert app.run([*typed, str(tmp_path / "whole")]) == 0
    assert "2 attention layers converted and verified, 16 of" in capsys.readouterr().out
    tokens = tokens_of()
    loaded = ssmax.hf.from_pretrained(tmp_path / "whole").eval()
    assert torch.equal(loaded(input_ids=tokens).logits, base(input_ids=tokens).logits)
    options = ["--adapter", "--json", "--init", "paper", "--train-length", "64"]
    assert app.run([*typed, str(tmp_path / "adapter"), *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["learnt"] == 8 and told["layers"] == 2
    ssmax.hf.load(build("llama"), tmp_path / "adapter")
    for more, message in (
        ([str(tmp_path / "whole")], "is not an empty folder"),
        ([str(tmp_path / "x"), "--init", "paper"], "needs train_length"),
        ([str(tmp_path / "x"), "--rule", "x"], "rule must be one of"),
    ):
        assert app.run([*typed, *more]) == 2
        assert message in capsys.readouterr().err
    assert app.run(["convert", str(tmp_path / "nowhere"), str(tmp_path / "x")]) == 2
    assert "cannot be loaded" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
