"""One file of code takes the package's place: the same lines, the same numbers, or a refusal."""

import ast
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import textwrap
import typing

import families
import pytest
import torch
import transformers
from tiny_models import build, randomise, tokens_of

import ssmax.hf
from ssmax.hf.bundle import bundle
from ssmax.hf.hook import install
from ssmax.nn import RULES, Rule


@pytest.fixture(autouse=True)
def hooks_of_its_own(monkeypatch):
    """Code loaded here hooks itself in over ours; later tests are not to meet it."""
    install()
    interface = transformers.AttentionInterface
    monkeypatch.setattr(interface, "get_interface", interface.get_interface)


ELSEWHERE = """
import sys
sys.modules["ssmax"] = None  # as if it were not installed
import torch
import transformers

torch.set_num_threads(1)
for folder, auto in zip(sys.argv[1::2], sys.argv[2::2]):
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
    inputs = torch.load(f"{folder}/inputs.pt")
    found = {"logits": model(**inputs).logits, "class": type(model).__name__}
    if model.can_generate():
        found["new"] = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    torch.save(found, f"{folder}/found.pt")
"""


def left_padded(rows=3, length=11):
    tokens = tokens_of(rows, length)
    mask = torch.ones_like(tokens)
    for row in range(rows):
        mask[row, : 2 * row] = 0
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.fixture(autouse=True)
def modules_here(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path / "m"
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


@torch.no_grad()
def test_without_the_package_the_model_is_the_same(tmp_path, modules_here):
    cases = [
        ("llama", "AutoModelForCausalLM"),
        ("gemma3", "AutoModelForCausalLM"),
        ("bert", "AutoModelForMaskedLM"),
    ]
    inputs = left_padded()
    models, arguments = {}, []
    for name, auto in cases:
        models[name] = randomise(ssmax.hf.convert(build(name), layers="all"))
        ssmax.hf.save_remote_code(models[name], tmp_path / name)
        torch.save(inputs, tmp_path / name / "inputs.pt")
        arguments += [str(tmp_path / name), auto]
    environment = {**os.environ, "HF_MODULES_CACHE": str(modules_here), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", ELSEWHERE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for name, model in models.items():
        found = torch.load(tmp_path / name / "found.pt")
        assert found["class"] == f"SSMax{type(model).__name__}"
        assert torch.equal(found["logits"], model(**inputs).logits)
        if model.can_generate():
            new = model.generate(**inputs, max_new_tokens=6, do_sample=False)
            assert torch.equal(found["new"], new)
        assert not torch.equal(found["logits"], ssmax.hf.revert(model)(**inputs).logits)


@torch.no_grad()
def test_beside_the_package_each_has_a_hook_of_its_own(tmp_path):
    ours = randomise(ssmax.hf.convert(build("llama")))
    ssmax.hf.save_remote_code(ours, tmp_path)
    tokens = tokens_of()
    wanted = ours(tokens).logits
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    # Whichever was installed last, no query is scaled twice or not at all.
    assert torch.equal(theirs(tokens).logits, wanted)
    ssmax.hf.convert(build("gpt2"))
    assert torch.equal(theirs(tokens).logits, wanted) and torch.equal(ours(tokens).logits, wanted)
    assert type(ours) is not type(theirs) and isinstance(theirs, type(ours))


@torch.no_grad()
def test_what_remote_code_saves_again_loads_again(tmp_path):
    model = randomise(ssmax.hf.convert(build("llama")))
    ssmax.hf.save_remote_code(model, tmp_path / "first")
    auto = transformers.AutoModelForCausalLM
    auto.from_pretrained(tmp_path / "first", trust_remote_code=True).save_pretrained(
        tmp_path / "second"
    )
    again = auto.from_pretrained(tmp_path / "second", trust_remote_code=True)
    tokens = tokens_of()
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    # With the package no code of the folder runs; the class is the plain one again.
    ours = ssmax.hf.from_pretrained(tmp_path / "second")
    assert type(ours) is type(model) and ours.config.model_type == "llama"
    assert torch.equal(ours(tokens).logits, model(tokens).logits)
    ours.save_pretrained(tmp_path / "third")
    config = json.loads((tmp_path / "third" / "config.json").read_text())
    assert "auto_map" not in config and config["model_type"] == "ssmax_llama"


@torch.no_grad()
def test_every_auto_class_that_knows_the_family_keeps_s(tmp_path):
    model = randomise(ssmax.hf.convert(build("llama")))
    ssmax.hf.save_remote_code(model, tmp_path)
    tokens = tokens_of()
    bare = transformers.AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    assert torch.equal(model.lm_head(bare(tokens).last_hidden_state), model(tokens).logits)
    labels = transformers.AutoModelForTokenClassification.from_pretrained(
        tmp_path, trust_remote_code=True
    )
    assert torch.equal(labels.model(tokens).last_hidden_state, bare(tokens).last_hidden_state)


@pytest.mark.parametrize(
    ("options", "s", "b"),
    [
        ({}, 0.0, 1.0),
        ({"init": "anneal", "train_length": 64}, 0.0, 1.0),
        ({"init": "paper", "train_length": 1024}, 0.1685, None),
        ({"init": "paper", "train_length": 1024, "bias": True}, 0.1685, 0.0),
    ],
)
def test_a_new_model_of_the_config_starts_as_it_says(tmp_path, options, s, b):
    model = randomise(ssmax.hf.convert(build("llama"), **options))
    ssmax.hf.save_remote_code(model, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    new = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    for layer in new.model.layers:
        scale = layer.self_attn.ssmax
        assert scale.s.tolist() == pytest.approx([s] * 4, abs=1e-4)
        assert b is None or scale.bias.tolist() == [b] * 4


@pytest.mark.parametrize(
    "auto", ["AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForTokenClassification"]
)
def test_whoever_does_not_trust_the_code_is_refused(tmp_path, auto):
    model = ssmax.hf.convert(build("llama"))
    ssmax.hf.save_remote_code(model, tmp_path)
    with pytest.raises(ValueError, match="trust_remote_code"):
        getattr(transformers, auto).from_pretrained(tmp_path, trust_remote_code=False)


def test_in_memory_a_config_of_remote_code_is_of_the_plain_type(tmp_path):
    """PEFT looks up the layers that it wraps by the type in the config's dictionary."""
    import peft

    ssmax.hf.save_remote_code(ssmax.hf.convert(build("llama")), tmp_path)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path, trust_remote_code=True)
    assert model.config.to_dict()["model_type"] == "llama"
    config = peft.LoraConfig(modules_to_save=["ssmax"])
    assert peft.get_peft_model(model, config).get_nb_trainable_parameters()[0]


def test_no_annotations_where_an_engine_reads_them(tmp_path, monkeypatch):
    """vLLM's Transformers backend calls isinstance on those of __init__; typing.Any refuses it."""
    ssmax.hf.save_remote_code(ssmax.hf.convert(build("llama")), tmp_path)
    path = tmp_path / "modeling_ssmax.py"
    spec = importlib.util.spec_from_file_location("written_code", path)
    written = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, written)
    spec.loader.exec_module(written)
    own = [one for name, one in vars(written).items() if name.startswith("SSMax")]
    models = [one for one in own if isinstance(one, type) and hasattr(one, "forward")]
    models = [one for one in models if issubclass(one, transformers.PreTrainedModel)]
    assert {"SSMaxLlamaModel", "SSMaxLlamaForCausalLM"} <= {one.__name__ for one in models}
    for model in models:
        assert not typing.get_type_hints(model.__init__)
        parameters = inspect.signature(model.__init__).parameters.values()
        assert all(one.annotation is inspect.Parameter.empty for one in parameters)


def test_an_unconverted_class_of_experts_is_kept_by_its_type(tmp_path):
    """Weights of experts are fused by a table that is keyed by the model's type."""
    torch.manual_seed(0)
    shared = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 99}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    config = transformers.MixtralConfig(**shared, **heads)
    model = randomise(ssmax.hf.convert(transformers.MixtralForCausalLM(config).eval()))
    ssmax.hf.save_remote_code(model, tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    with torch.no_grad():
        assert torch.equal(again(tokens_of()).logits, model(tokens_of()).logits)


@pytest.mark.parametrize(
    ("kind", "family", "auto"),
    [
        ("causal", "gpt_neox", "AutoModelForCausalLM"),
        ("image-text", "llava", "AutoModelForImageTextToText"),
        ("image-text", "qwen2_vl", "AutoModelForImageTextToText"),
    ],
)
def test_weights_that_are_renamed_by_the_name_of_the_class(tmp_path, kind, family, auto):
    model = randomise(ssmax.hf.convert(families.build(kind, family), layers="all"))
    ssmax.hf.save_remote_code(model, tmp_path / "first")
    auto = getattr(transformers, auto)
    once = auto.from_pretrained(tmp_path / "first", trust_remote_code=True)
    once.save_pretrained(tmp_path / "second")
    again = auto.from_pretrained(tmp_path / "second", trust_remote_code=True)
    bare = transformers.AutoModel.from_pretrained(tmp_path / "first", trust_remote_code=True)
    wanted = model.state_dict()
    for found in (once.state_dict(), again.state_dict()):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    inner = getattr(model, model.base_model_prefix).state_dict()
    assert all(torch.equal(value, inner[name]) for name, value in bare.state_dict().items())


@pytest.mark.parametrize("load", ["remote code", "the package"])
@pytest.mark.parametrize(
    "gone", ["model.layers.1.self_attn.ssmax.s", "model.layers.0.mlp.up_proj.weight"]
)
def test_remote_code_without_some_of_its_weights_is_refused(tmp_path, gone, load):
    from safetensors.torch import load_file, save_file

    ssmax.hf.save_remote_code(ssmax.hf.convert(build("llama")), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights[gone]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks {gone}"):
        if load == "remote code":
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
        else:
            ssmax.hf.from_pretrained(tmp_path)


def test_the_package_does_not_pretend_to_reach_a_model_of_remote_code(tmp_path):
    model = ssmax.hf.convert(build("llama"), init="anneal", train_length=64)
    ssmax.hf.save_remote_code(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    for work in (
        lambda: ssmax.hf.save(theirs, tmp_path / "adapter"),
        lambda: ssmax.hf.anneal(theirs, 1.0, 0.0),
        lambda: ssmax.hf.revert(theirs),
        lambda: ssmax.hf.verify(theirs),
        lambda: ssmax.hf.save_remote_code(theirs, tmp_path / "again"),
    ):
        with pytest.raises(ValueError, match="code in its folder .*ssmax.hf.from_pretrained"):
            work()
    # What goes by names alone does.
    groups = ssmax.hf.param_groups(ssmax.hf.freeze_all_but_ssmax(theirs), 1e-5, 1e-3)
    assert [group["lr"] for group in groups] == [1e-3] and len(groups[0]["params"]) == 4


def test_what_cannot_be_saved_as_remote_code_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="not converted"):
        ssmax.hf.save_remote_code(build("llama"), tmp_path)

    class Mine(transformers.LlamaForCausalLM):
        pass

    mine = ssmax.hf.convert(Mine(build("llama").config))
    with pytest.raises(ValueError, match="no Auto class .* to Mine"):
        ssmax.hf.save_remote_code(mine, tmp_path)
    inner = ssmax.hf.convert(families.build("causal", "mllama"))
    with pytest.raises(ValueError, match="no Auto class .* to MllamaForCausalLM"):
        ssmax.hf.save_remote_code(inner, tmp_path)
    own = Rule(lambda m, n: m.s[:, None] * n.log1p().unsqueeze(-2), {"s": lambda _: 1.0})
    # One of somebody's own, and another by a name that the file has too.
    for name in ("log1p", "temperature"):
        monkeypatch.setitem(RULES, name, own)
        model = ssmax.hf.convert(build("llama"), rule=name, init="paper")
        with pytest.raises(ValueError, match=f"rule '{name}' is not this package's own"):
            ssmax.hf.save_remote_code(model, tmp_path)
    assert not [*tmp_path.iterdir()]


# What the compiler imports is not ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_is_saved_as_the_model_inside(tmp_path):
    model = ssmax.hf.convert(build("llama"))
    ssmax.hf.save_remote_code(torch.compile(model, backend="eager"), tmp_path)
    assert type(ssmax.hf.from_pretrained(tmp_path)) is type(model)


def test_the_command_line_writes_remote_code(tmp_path, capsys):
    from ssmax import cli

    build("llama").save_pretrained(tmp_path / "base")
    typed = ["convert", str(tmp_path / "base"), str(tmp_path / "out")]
    assert cli.run([*typed, "--adapter", "--remote-code"]) == 2
    assert "--adapter writes s and b alone" in capsys.readouterr().err
    assert cli.run([*typed, "--remote-code"]) == 0
    assert "with AutoModelForCausalLM.from_pretrained(" in capsys.readouterr().out
    build("bert").save_pretrained(tmp_path / "bert")
    assert cli.run(["convert", str(tmp_path / "bert"), str(tmp_path / "b"), "--remote-code"]) == 0
    assert "with AutoModelForMaskedLM.from_pretrained(" in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "ssmax_llama"
    capsys.readouterr()
    assert cli.run(["convert", str(tmp_path / "out"), str(tmp_path / "twice")]) == 2
    wanted = f"{tmp_path / 'out'} is converted already; load it with ssmax.hf.from_pretrained"
    assert wanted in capsys.readouterr().err


def test_the_file_is_our_own_lines(tmp_path):
    ssmax.hf.save_remote_code(ssmax.hf.convert(build("llama")), tmp_path)
    text = (tmp_path / "modeling_ssmax.py").read_text()
    imported = {
        (alias.name if isinstance(node, ast.Import) else node.module).partition(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported - sys.stdlib_module_names == {"torch", "transformers"}
    from ssmax.hf import hook, masks
    from ssmax.ops import scale

    for ours in (
        masks.count_keys,
        hook.install_attention,
        scale.ssmax_factor,
        ssmax.nn.SSMaxScale,
    ):
        assert inspect.getsource(ours) in text


def test_a_bundle_holds_what_its_roots_lead_to(tmp_path, monkeypatch):
    package = tmp_path / "ssmax_bundled"
    package.mkdir()
    files = {
        "__init__": "",
        "low": """
            import math

            def half(x):
                return x / 2

            def unused():
                return math.pi
            """,
        "high": """
            from ssmax_bundled.low import half

            # Why it is 3.
            THREE, FOUR = 3, 4
            \"\"\"Numbers.\"\"\"


            def more(x):
                return half(x) + THREE
            """,
    }
    for name, text in files.items():
        (package / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("ssmax.hf.bundle.PACKAGE", "ssmax_bundled")
    modules = ["ssmax_bundled.low", "ssmax_bundled.high"]
    text, made = bundle(modules, ["more"], {}), {}
    exec(text, made)
    assert made["more"](4) == 5
    assert "unused" not in made and "math" not in made
    assert '# Why it is 3.\nTHREE, FOUR = 3, 4\n"""Numbers."""' in text
    exec(bundle(modules, ["more"], {"half": "unused"}), made)
    assert made["half"] is made["unused"]
    with pytest.raises(ValueError, match="another's name"):
        bundle([*modules, modules[0]], ["more"], {})
    with pytest.raises(ValueError, match="half are of modules that are not bundled"):
        bundle(modules[1:], ["more"], {})
