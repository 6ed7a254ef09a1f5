"""What cannot be converted, trained or loaded: one clear error each, and the model as it was."""

import json
import os

import peft
import pytest
import torch
import torch.distributed as dist
import transformers as tf
from tiny_models import SHARED, build, tokens_of
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ssmax.hf
from ssmax.hf.hook import HookedScale


def own_attention():
    config = tf.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=99)
    return tf.BloomForCausalLM(config)


class QuantAttentionFused(torch.nn.Module):
    """As engines of quantised weights put in place of a model's own."""

    def forward(self, hidden_states, **_):
        return hidden_states, None


def fused(model):
    for layer in model.model.layers:
        layer.self_attn = QuantAttentionFused()
    return model


def other_heads(model, scale=None):
    """A layer of two heads that are as wide as the others' four, and says nothing of it."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    config = tf.LlamaConfig(**{**SHARED, "num_attention_heads": 2, "head_dim": 8})
    config._attn_implementation = "sdpa"
    layer = model.model.layers[1]
    layer.self_attn = LlamaAttention(config, 1)
    layer.self_attn.config = model.config
    if scale is not None:
        layer.self_attn.ssmax = scale
    return model


def heads_in_a_list(model):
    model.model.layers[1].self_attn.config = tf.LlamaConfig(**SHARED)
    model.model.layers[1].self_attn.config.__dict__["num_attention_heads"] = [4, 2]
    return model


def adapter_of(model, folder, **options):
    ssmax.hf.save(ssmax.hf.convert(model, **options), folder)
    return folder


def first(name, _module):
    return ".0." in name


def written(folder, values):
    (folder / "ssmax.json").write_text(json.dumps(values))
    return folder


def of_conversion(folder, values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "ssmax": values}))
    return folder


def wider():
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**SHARED, "hidden_size": 64}))


def deeper():
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**SHARED, "num_hidden_layers": 3}))


def plainly_loaded(model, folder):
    """A converted checkpoint, as Transformers alone reads it where somebody names the class."""
    ssmax.hf.convert(model).save_pretrained(folder)
    return tf.LlamaForCausalLM.from_pretrained(folder)


def picture_model():
    config = tf.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        image_size=16, patch_size=4,
    )  # fmt: skip
    return ssmax.hf.convert(tf.ViTModel(config))


def picture_and_text_model():
    parts = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
             "intermediate_size": 48}  # fmt: skip
    pictures = {**parts, "image_size": 16, "patch_size": 4}
    config = tf.CLIPConfig(text_config={**parts, "vocab_size": 99}, vision_config=pictures)
    return ssmax.hf.convert(tf.CLIPModel(config))


def cut_short(folder, name, size=50):
    os.truncate(folder / name, size)
    return folder


def whole_of(model, folder):
    ssmax.hf.convert(model).save_pretrained(folder)
    return folder


def with_nan(model, value=float("nan"), layer=1):
    ssmax.hf.convert(model)
    with torch.no_grad():
        model.model.layers[layer].self_attn.ssmax.bias[0] = value
    return model


def with_nan_weight(model):
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    return model


def with_nan_token(model):
    with torch.no_grad():
        model.model.embed_tokens.weight[6] = torch.nan
    return model


def eager_in_float64(model):
    model.set_attn_implementation("eager")
    return model.double()


def nan_in_an_adapter(model, folder):
    ssmax.hf.save(with_nan(model), folder)
    return folder


def nan_in_a_checkpoint(model, folder):
    with_nan(model, float("inf")).save_pretrained(folder)
    return folder


def of_another_rule(folder, file="config.json"):
    """One of somebody's own, which was registered elsewhere."""
    text = (folder / file).read_text()
    (folder / file).write_text(text.replace('"ssmax_bias"', '"loglog"'))
    return folder


def shallower(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return folder


def with_lora(model):
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


def untrusted(model, folder):
    """A checkpoint of a class that comes with it."""
    ssmax.hf.convert(model)
    model.config.architectures = ["TheirsForCausalLM"]
    model.config.save_pretrained(folder)
    return folder


BAD = {
    "no model": (lambda m, _: ssmax.hf.convert("gpt2"), "takes a model of Transformers, got str"),
    "no config": (lambda m, _: ssmax.hf.convert(torch.nn.Linear(2, 2)), "got Linear"),
    "twice": (lambda m, _: ssmax.hf.convert(ssmax.hf.convert(m)), "converted already"),
    "its inside, again": (
        lambda m, _: ssmax.hf.convert(ssmax.hf.convert(m).model), "converted already",
    ),
    "around what is converted": (
        lambda m, _: ssmax.hf.convert(m.model) and ssmax.hf.convert(m), "converted already",
    ),
    "loaded as softmax": (
        lambda m, folder: ssmax.hf.convert(plainly_loaded(m, folder)),
        r"config of this LlamaForCausalLM says .*ssmax.hf.from_pretrained loads",
    ),
    "an adapter for what was loaded as softmax": (
        lambda m, folder: ssmax.hf.load(
            plainly_loaded(m, folder), adapter_of(build("llama"), folder)
        ),
        r"config of this LlamaForCausalLM says .*ssmax.hf.from_pretrained loads",
    ),
    "after PEFT": (lambda m, _: ssmax.hf.convert(with_lora(m)), "before PEFT wraps it"),
    "inside PEFT": (
        lambda m, _: ssmax.hf.convert(with_lora(m).get_base_model()), "before PEFT wraps it",
    ),
    "learning what PEFT does not save": (
        lambda m, _: ssmax.hf.freeze_all_but_ssmax(with_lora(ssmax.hf.convert(m))),
        r"pass modules_to_save=\['ssmax'\]",
    ),
    "a rate for what PEFT froze": (
        lambda m, _: ssmax.hf.param_groups(with_lora(ssmax.hf.convert(m)), 1e-4, ssmax_lr=1e-3),
        r"pass modules_to_save=\['ssmax'\]",
    ),
    "learning what nothing can": (
        lambda m, _: ssmax.hf.freeze_all_but_ssmax(
            ssmax.hf.convert(m, rule="clamp", train_length=8)
        ),
        r"rule 'clamp' of this model has nothing that could learn",
    ),
    "compiled": (lambda m, _: ssmax.hf.convert(torch.compile(m)), "before torch.compile"),
    "paper": (lambda m, _: ssmax.hf.convert(m, init="paper"), "needs train_length"),
    "clamp": (lambda m, _: ssmax.hf.convert(m, rule="clamp"), "needs train_length"),
    "anneal": (lambda m, _: ssmax.hf.convert(m, init="anneal"), "needs train_length"),
    "init": (lambda m, _: ssmax.hf.convert(m, init="zero"), "init must be one of identity, paper"),
    "rule": (lambda m, _: ssmax.hf.convert(m, rule="softmx"), "rule must be one of"),
    "no identity": (
        lambda m, _: ssmax.hf.convert(m, rule="sqrt_log", train_length=64),
        "does not start as softmax",
    ),
    "identity without bias": (lambda m, _: ssmax.hf.convert(m, bias=False), "needs the bias"),
    "bias of another rule": (
        lambda m, _: ssmax.hf.convert(m, rule="temperature", bias=True), "belongs to rule='ssmax'",
    ),
    "bias of clamp": (
        lambda m, _: ssmax.hf.convert(m, rule="clamp", train_length=8, bias=True),
        "belongs to rule='ssmax'",
    ),
    "no bias of temperature": (
        lambda m, _: ssmax.hf.convert(m, rule="temperature", bias=False), "bias=False belongs to",
    ),
    "no bias of a rule that has one": (
        lambda m, _: ssmax.hf.convert(
            m, rule="ssmax_bias", init="paper", train_length=8, bias=False
        ),
        "for none pass rule='ssmax'",
    ),
    "layers": (lambda m, _: ssmax.hf.convert(m, layers="some"), "'full', 'all' or a function"),
    "attention": (lambda m, _: ssmax.hf.convert(m, attention="cross"), "'self' or 'all'"),
    "no layer": (lambda m, _: ssmax.hf.convert(m, layers=lambda n, x: False), 
                 r"has no attention layer for layers=<function .* give a function that says"),
    "windowed layers alone": (
        lambda m, _: ssmax.hf.convert(build("mistral")),
        r"for layers='full', attention='self'; .*: try layers='all'$",
    ),
    "length": (lambda m, _: ssmax.hf.convert(m, init="paper", train_length=1), "at least 2"),
    "a length that identity does not use": (
        lambda m, _: ssmax.hf.convert(m, train_length=0), "at least 2",
    ),
    "own attention": (
        lambda m, _: ssmax.hf.convert(own_attention()),
        r"has its own attention code \(BloomAttention\)",
    ),
    "a quantised class": (
        lambda m, _: ssmax.hf.convert(fused(m)),
        r"own attention code \(QuantAttentionFused\)",
    ),
    "heads that differ from its ssmax": (
        lambda m, _: ssmax.hf.verify(other_heads(ssmax.hf.convert(m), HookedScale(4, "ssmax", 8))),
        "layer 1 has 2 query heads here, its ssmax was made for 4",
    ),
    "heads in a list": (
        lambda m, _: ssmax.hf.convert(heads_in_a_list(m)),
        "model.layers.1.self_attn .* how many heads",
    ),
    "verify": (lambda m, _: ssmax.hf.verify(m), "is not converted"),
    "revert": (lambda m, _: ssmax.hf.revert(m), "was not converted"),
    "groups": (lambda m, _: ssmax.hf.param_groups(m, 1e-4), "is not converted"),
    "freeze": (lambda m, _: ssmax.hf.freeze_all_but_ssmax(m), "is not converted"),
    "save": (lambda m, folder: ssmax.hf.save(m, folder), "is not converted"),
    "anneal of identity": (
        lambda m, _: ssmax.hf.anneal(ssmax.hf.convert(m), 1.0, 0.0), "not 'anneal'",
    ),
    "back": (
        lambda m, _: ssmax.hf.anneal(ssmax.hf.convert(m, init="anneal", train_length=8), 0.1, 0.5),
        "never back",
    ),
    "an adapter for another model": (
        lambda m, folder: ssmax.hf.load(m, adapter_of(build("gpt2"), folder)),
        "of model_type = gpt2, this LlamaForCausalLM has model_type = llama",
    ),
    "an adapter for another family with the same layers": (
        lambda m, folder: ssmax.hf.load(m, adapter_of(build("olmo2"), folder)),
        "of model_type = olmo2, this LlamaForCausalLM has model_type = llama",
    ),
    "an adapter for a deeper model": (
        lambda m, folder: ssmax.hf.load(m, adapter_of(deeper(), folder)),
        "is an adapter for a model of attention_layers = 3, this LlamaForCausalLM has "
        "attention_layers = 2; the adapter is for another model",
    ),
    "an adapter for a shallower model": (
        lambda m, folder: ssmax.hf.load(deeper(), adapter_of(m, folder)),
        "of attention_layers = 2, this LlamaForCausalLM has attention_layers = 3",
    ),
    "an adapter for some layers of a deeper model": (
        lambda m, folder: ssmax.hf.load(m, adapter_of(deeper(), folder, layers=first)),
        "of attention_layers = 3, this LlamaForCausalLM has attention_layers = 2",
    ),
    "an adapter for a wider model": (
        lambda m, folder: ssmax.hf.load(m, adapter_of(wider(), folder)),
        "is an adapter for a model of hidden_size = 64, this LlamaForCausalLM has hidden_size = 32",
    ),
    "an adapter whose json is a list": (
        lambda m, folder: ssmax.hf.load(build("llama"), written(adapter_of(m, folder), [1])),
        r"ssmax.json must be an object with attention_layers, conversion, .*, got \[1\]",
    ),
    "a checkpoint whose conversion is a word": (
        lambda m, folder: ssmax.hf.from_pretrained(of_conversion(whole_of(m, folder), "yes")),
        r"'ssmax' of .*/config.json must be an object with init, .*got 'yes'; it was changed",
    ),
    "a checkpoint whose layers are null": (
        lambda m, folder: ssmax.hf.from_pretrained(
            of_conversion(whole_of(m, folder), {**m.config.ssmax, "layers": None})
        ),
        r"the layers of the 'ssmax' of .*/config.json must be a list of names, got None",
    ),
    "an adapter for no model": (
        lambda m, folder: ssmax.hf.load("gpt2", adapter_of(m, folder)),
        "takes a model of Transformers, got str",
    ),
    "an adapter before its model": (
        lambda m, folder: ssmax.hf.load("adapter", m), "takes a model of Transformers, got str",
    ),
    "a checkpoint of a rule that is not known": (
        lambda m, folder: ssmax.hf.from_pretrained(of_another_rule(whole_of(m, folder))),
        "converted with the rule 'loglog', which is not known here: register it in ssmax.nn.RULES",
    ),
    "an adapter of a rule that is not known": (
        lambda m, folder: ssmax.hf.load(
            build("llama"), of_another_rule(adapter_of(m, folder), "ssmax.json")
        ),
        "converted with the rule 'loglog', which is not known here: register it in ssmax.nn.RULES",
    ),
    "an adapter for a converted model": (
        lambda m, folder: ssmax.hf.load(ssmax.hf.convert(m), adapter_of(build("llama"), folder)),
        "converted already",
    ),
    "an adapter whose json is cut short": (
        lambda m, folder: ssmax.hf.load(
            build("llama"), cut_short(adapter_of(m, folder), "ssmax.json")
        ),
        r"ssmax.json cannot be read .*it is damaged or was cut short",
    ),
    "an adapter whose tensors are cut short": (
        lambda m, folder: ssmax.hf.load(
            build("llama"), cut_short(adapter_of(m, folder), "ssmax.safetensors")
        ),
        r"ssmax.safetensors cannot be read .*it is damaged or was cut short",
    ),
    "a checkpoint that is cut short": (
        lambda m, folder: ssmax.hf.from_pretrained(
            cut_short(whole_of(m, folder), "model.safetensors", 1000)
        ),
        r"model.safetensors cannot be read .*it is damaged or was cut short",
    ),
    "NaN in an adapter": (
        lambda m, folder: ssmax.hf.load(build("llama"), nan_in_an_adapter(m, folder)),
        r"has NaN or infinity in model.layers.1.self_attn.ssmax.bias; the training",
    ),
    "infinity in a checkpoint": (
        lambda m, folder: ssmax.hf.from_pretrained(nan_in_a_checkpoint(m, folder)),
        r"has NaN or infinity in model.layers.1.self_attn.ssmax.bias; the training",
    ),
    "a folder that is not there": (
        lambda m, folder: ssmax.hf.from_pretrained(folder / "x"),
        "x' cannot be loaded: there is no such folder",
    ),
    "a relative one": (
        lambda m, _: ssmax.hf.from_pretrained("./nowhere"),
        "'./nowhere' cannot be loaded: there is no such folder",
    ),
    "an adapter as a model": (
        lambda m, folder: ssmax.hf.from_pretrained(adapter_of(m, folder)),
        r"holds an adapter, .* then its s and b with ssmax.hf.load\(model, ",
    ),
    "a plain model": (
        lambda m, folder: ssmax.hf.from_pretrained(m.save_pretrained(folder) or folder),
        r"holds no converted model: .*convert it with ssmax convert .* OUT",
    ),
    "a config of fewer layers": (
        lambda m, folder: ssmax.hf.from_pretrained(shallower(whole_of(m, folder))),
        "no attention layer model.layers.1.self_attn; the 'ssmax' of its config is for another",
    ),
    "pictures alone": (
        lambda m, _: ssmax.hf.verify(picture_model()),
        r"could not run this ViTModel on tokens .*verify\(model, inputs={'pixel_values': ...}\)",
    ),
    "pictures and text": (
        lambda m, _: ssmax.hf.verify(picture_and_text_model()),
        r"run this CLIPModel on tokens .*inputs={'input_ids': ..., 'pixel_values': ...}\)",
    ),
    "weights of the model's own that are NaN": (
        lambda m, _: ssmax.hf.verify(ssmax.hf.convert(with_nan_weight(m))),
        r"what 'model.layers.1.self_attn' reads is NaN .* look at .* the model's own weights",
    ),
    "one token that is NaN": (
        lambda m, _: ssmax.hf.verify(ssmax.hf.convert(with_nan_token(m))),
        r"what 'model.layers.0.self_attn' reads is NaN .* look at .* the model's own weights",
    ),
    "NaN behind padding, in float64 and eager code": (
        lambda m, _: ssmax.hf.verify(ssmax.hf.convert(eager_in_float64(m))),
        r"reads is NaN or infinite behind 5 of padding.*'sdpa' bears padding",
    ),
    "an s that is NaN": (
        lambda m, _: ssmax.hf.verify(with_nan(m, layer=0)),
        r"bias holds NaN; the training that made it has diverged",
    ),
    "a class that nobody trusted": (
        lambda m, folder: ssmax.hf.from_pretrained(untrusted(m, folder)),
        "TheirsForCausalLM.*remote code has to be converted after loading",
    ),
}  # fmt: skip


# What the compiler imports is not ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_clear_error(name, tmp_path):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        call(build("llama"), tmp_path)
    assert "\n" not in str(caught.value)


def test_what_reads_no_tokens_is_verified_by_what_it_reads():
    with pytest.raises(ValueError) as caught:
        ssmax.hf.verify(picture_model())
    assert isinstance(caught.value.__cause__, AttributeError)
    pictures = {"pixel_values": torch.randn(2, 3, 16, 16)}
    assert ssmax.hf.verify(picture_model(), inputs=pictures).layers == 2


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (DistributedDataParallel, "convert the model inside it, before it is wrapped"),
        (fully_shard, "sharded already; convert it before"),
    ],
)
def test_what_is_spread_over_ranks_was_converted_too_late(one_rank, wrap, message):
    with pytest.raises(ValueError, match=message):
        ssmax.hf.convert(wrap(build("llama")))


def test_what_wraps_a_converted_model_for_several_gpus_is_looked_into(tmp_path):
    wrapped = torch.nn.DataParallel(ssmax.hf.convert(build("llama")))
    assert ssmax.hf.verify(wrapped).layers == 2
    ssmax.hf.save(wrapped, tmp_path)
    assert ssmax.hf.verify(ssmax.hf.load(build("llama"), tmp_path)).layers == 2


def test_a_refused_model_is_as_it_was():
    model = heads_in_a_list(build("llama"))
    before = model(input_ids=tokens_of()).logits
    with pytest.raises(ValueError, match="how many heads"):
        ssmax.hf.convert(model)
    assert torch.equal(model(input_ids=tokens_of()).logits, before)
    assert not hasattr(model.config, "ssmax")


def test_remote_code_that_is_not_trusted_is_not_run(tmp_path, capsys, monkeypatch):
    from ssmax import cli

    (tmp_path / "theirs.py").write_text("raise SystemExit('run')")
    (tmp_path / "config.json").write_text(
        '{"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.TheirsConfig"}}'
    )
    asked = []
    monkeypatch.setattr("builtins.input", lambda prompt="": asked.append(prompt) or "n")
    assert cli.run(["convert", str(tmp_path), str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "brings code of its own" in line and "trust_remote_code=True" in line
    assert not asked
