"""Nothing is lost silently: adapters, whole checkpoints, and what is missing in them."""

import copy
import errno
import hashlib
import json
import os
import pickle
import subprocess
import sys

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import GPT2, OFFLOADED, SHARED, build, inputs_of, randomise, tokens_of

import ssmax.hf
from ssmax.hf.adapter import ssmax_tensors


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


def test_ranks_that_save_at_once_into_one_folder_leave_it_whole(tmp_path, monkeypatch):
    model = randomise(ssmax.hf.convert(build("llama")))
    others = [lambda: ssmax.hf.save(model, tmp_path)]

    def interrupted(tensors, path):
        save_file(tensors, path)
        if others:
            others.pop()()

    monkeypatch.setattr("safetensors.torch.save_file", interrupted)
    ssmax.hf.save(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ssmax.json", "ssmax.safetensors"]
    stored = ssmax_tensors(ssmax.hf.load(build("llama"), tmp_path))
    assert all(torch.equal(stored[name], s) for name, s in ssmax_tensors(model).items())


# What the compiler imports is not ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_adapter_of_a_compiled_model_is_that_of_the_model_inside(tmp_path):
    model = randomise(ssmax.hf.convert(build("llama")))
    compiled = torch.compile(model, backend="eager")
    ssmax.hf.save(compiled, tmp_path)
    stored = ssmax_tensors(ssmax.hf.load(build("llama"), tmp_path))
    assert all(torch.equal(stored.pop(name), s) for name, s in ssmax_tensors(model).items())
    assert not stored and ssmax.hf.verify(compiled).layers == 2


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "bart", "qwen3"])
def test_a_whole_checkpoint_comes_back_bit_for_bit(name, tmp_path):
    model = randomise(ssmax.hf.convert(build(name)))
    model.save_pretrained(tmp_path)
    loaded = ssmax.hf.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model)
    # Of classes that a fresh process finds, also in the copies of a config.
    pickle.dumps(loaded)
    inputs = inputs_of(model, tokens_of())
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    ssmax.hf.verify(loaded)
    # And again, from what was loaded.
    loaded.save_pretrained(tmp_path / "again")
    again = ssmax.hf.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)


def is_refused(folder, auto="AutoModelForCausalLM"):
    """True where plain Transformers does not know the type; False where it loads."""
    try:
        getattr(transformers, auto).from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:
        assert "model type `ssmax_" in str(error)
        return True
    return False


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("llama", "AutoModelForCausalLM"), ("gpt2", "AutoModelForCausalLM"),
        ("bert", "AutoModelForMaskedLM"), ("bart", "AutoModelForSeq2SeqLM"),
    ],
)  # fmt: skip
def test_plain_transformers_refuses_a_converted_model_until_it_is_reverted(name, auto, tmp_path):
    base = build(name)
    before, kind = base.config.to_dict(), type(base.config)
    model = ssmax.hf.convert(base)
    model.save_pretrained(tmp_path / "converted")
    for each in ("AutoConfig", "AutoModel", auto):
        assert is_refused(tmp_path / "converted", each)
    # In memory the type is the plain one.
    now = model.config.to_dict()
    assert type(model.config) is kind and now["model_type"] == before["model_type"]
    ssmax.hf.revert(model).save_pretrained(tmp_path / "reverted")
    build(name).save_pretrained(tmp_path / "base")
    texts = [(tmp_path / each / "config.json").read_text() for each in ("reverted", "base")]
    assert texts[0] == texts[1] and not is_refused(tmp_path / "reverted", auto)


def test_plain_transformers_refuses_a_clamp_which_has_no_tensor_to_miss(tmp_path):
    ssmax.hf.convert(build("llama"), rule="clamp", train_length=8).save_pretrained(tmp_path)
    assert is_refused(tmp_path)


SAVED = {
    "a copy": lambda model, _: copy.deepcopy(model),
    "a copy of the config": lambda model, _: with_config(model, copy.deepcopy(model.config)),
    "what was pickled": lambda model, _: pickle.loads(pickle.dumps(model)),
    "what was loaded": lambda model, folder: ssmax.hf.from_pretrained(whole(model, folder)),
    "an adapter's model": lambda model, folder: ssmax.hf.load(build("llama"), part(model, folder)),
    "one with another's auto_map": lambda model, _: with_auto_map(model),
    "a model of a head of its own": lambda model, _: model.model,
}


def with_config(model, config):
    model.config = config
    return model


def with_auto_map(model):
    """As a folder of the Hub that Transformers has learned to read without its code."""
    model.config.auto_map = {"AutoConfig": "theirs.TheirConfig", "AutoModel": "theirs.TheirModel"}
    return model


def whole(model, folder):
    model.save_pretrained(folder / "whole")
    return folder / "whole"


def part(model, folder):
    ssmax.hf.save(model, folder / "part")
    return folder / "part"


@torch.no_grad()
@pytest.mark.parametrize("name", SAVED)
def test_however_a_converted_model_came_about_what_it_saves_is_refused(name, tmp_path):
    model = randomise(ssmax.hf.convert(build("llama")))
    tokens = tokens_of()
    wanted = model.model(tokens).last_hidden_state
    saved = SAVED[name](model, tmp_path)
    saved.save_pretrained(tmp_path / "out")
    assert is_refused(tmp_path / "out")
    again = ssmax.hf.from_pretrained(tmp_path / "out")
    assert torch.equal(getattr(again, "model", again)(tokens).last_hidden_state, wanted)


@torch.no_grad()
def test_a_pickled_model_is_converted_in_a_fresh_process_and_saves_a_type_of_its_own(tmp_path):
    model = randomise(ssmax.hf.convert(build("llama")))
    torch.save((model, tokens_of(), model(tokens_of()).logits), tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        "model, tokens, before = torch.load(sys.argv[1], weights_only=False)\n"
        "for _ in range(2):\n"
        "    with torch.no_grad():\n"
        "        torch.testing.assert_close(model(tokens).logits, before)\n"
        "model.save_pretrained(sys.argv[2])"
    )
    typed = [sys.executable, "-c", code, str(tmp_path / "model.pt"), str(tmp_path / "out")]
    done = subprocess.run(typed, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert is_refused(tmp_path / "out")


def test_a_model_that_runs_by_code_of_its_folder_keeps_its_type(tmp_path):
    """It cannot be found without its auto_map; s and b go with ssmax.hf.save."""

    class Theirs(transformers.LlamaForCausalLM):
        pass

    model = ssmax.hf.convert(Theirs(build("llama").config))
    model.config.auto_map = {"AutoModelForCausalLM": "theirs.Theirs"}
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "llama" and "auto_map" in config


def test_a_converted_models_folder_has_its_tokenizer(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 5, "b": 6}, "a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    ssmax.hf.convert(build("llama")).save_pretrained(tmp_path)
    for auto in (transformers.AutoTokenizer, transformers.AutoProcessor):
        assert auto.from_pretrained(tmp_path).vocab_size == 2
    assert transformers.GenerationConfig.from_pretrained(tmp_path).eos_token_id == 2


@torch.no_grad()
def test_shards_subfolders_and_revisions_are_found(tmp_path):
    """A cache of the Hub with two revisions of one model, each in shards in a subfolder."""
    models = {name: randomise(ssmax.hf.convert(build("llama")), seed=i)
              for i, name in enumerate(("first", "second"))}  # fmt: skip
    repository = tmp_path / "models--someone--some-model"
    for name, model in models.items():
        commit = hashlib.sha1(name.encode()).hexdigest()
        folder = repository / "snapshots" / commit / "inner"
        model.save_pretrained(folder, max_shard_size="20kB")
        assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    tokens = tokens_of()
    for name, model in models.items():
        loaded = ssmax.hf.from_pretrained(
            "someone/some-model",
            revision=name,
            subfolder="inner",
            cache_dir=tmp_path,
            local_files_only=True,
        )
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_s_is_float32_and_exact(tmp_path, dtype):
    model = randomise(ssmax.hf.convert(build("llama")))
    model.save_pretrained(tmp_path / "whole")
    wanted = ssmax.hf.from_pretrained(tmp_path / "whole", dtype=dtype)
    away = ssmax.hf.from_pretrained(
        tmp_path / "whole", dtype=dtype, device_map=OFFLOADED, offload_folder=tmp_path / "off"
    )
    assert away.model.layers[0].self_attn.ssmax.s.device.type == "meta"
    tokens = tokens_of()
    assert torch.equal(away(tokens).logits, wanted(tokens).logits)
    ssmax.hf.save(away, tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "ssmax.safetensors")
    for name, value in ssmax_tensors(model).items():
        assert stored[name].dtype == torch.float32 and torch.equal(stored[name], value)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_an_adapter_fits_an_offloaded_base(tmp_path):
    model = randomise(ssmax.hf.convert(build("llama")))
    ssmax.hf.save(model, tmp_path / "adapter")
    build("llama").save_pretrained(tmp_path / "base")
    base = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "base", device_map=OFFLOADED, offload_folder=tmp_path / "off"
    )
    ssmax.hf.load(base, tmp_path / "adapter")
    assert ssmax.hf.verify(base).layers == 2
    tokens = tokens_of()
    assert torch.equal(base(tokens).logits, model(tokens).logits)
    base.save_pretrained(tmp_path / "whole")
    whole = ssmax.hf.from_pretrained(tmp_path / "whole")
    assert torch.equal(whole(tokens).logits, model(tokens).logits)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:torch.*deprecated")
def test_an_adapter_fits_a_quantised_base(tmp_path):
    model = randomise(ssmax.hf.convert(build("llama")))
    ssmax.hf.save(model, tmp_path)
    quantised = quantise(build("llama"))
    ssmax.hf.load(quantised, tmp_path)
    ssmax.hf.verify(quantised)
    tokens = tokens_of()
    # The same layers made int8 after the conversion: what differs is not the adapter.
    assert torch.equal(quantised(tokens).logits, quantise(model)(tokens).logits)
    assert not torch.equal(quantised(tokens).logits, quantise(build("llama"))(tokens).logits)
    scale = quantised.model.layers[0].self_attn.ssmax.s
    assert scale.dtype == torch.float32
    ssmax.hf.save(quantised, tmp_path / "again")
    assert (
        load_file(tmp_path / "again" / "ssmax.safetensors").keys()
        == load_file(tmp_path / "ssmax.safetensors").keys()
    )


def quantise(model):
    """A copy with every linear layer in int8, packed: its weights are no tensors any more."""
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


@torch.no_grad()
@pytest.mark.parametrize(
    "cast",
    [
        lambda model, folder: ssmax.hf.from_pretrained(folder).to(torch.bfloat16),
        lambda model, folder: ssmax.hf.from_pretrained(folder).half(),
        lambda model, folder: ssmax.hf.from_pretrained(folder, dtype="auto"),
        lambda model, folder: ssmax.hf.from_pretrained(folder, dtype="auto", device_map="auto"),
        lambda model, folder: ssmax.hf.from_pretrained(folder, dtype=torch.float16),
        lambda model, folder: ssmax.hf.load(build("llama").to(torch.bfloat16), folder / "adapter"),
        lambda model, folder: copy.deepcopy(model).to(torch.bfloat16),
    ],
)
def test_whatever_a_model_is_cast_to_s_stays_float32(tmp_path, cast):
    model = randomise(ssmax.hf.convert(build("llama").to(torch.bfloat16)))
    model.save_pretrained(tmp_path)
    ssmax.hf.save(model, tmp_path / "adapter")
    narrow = cast(model, tmp_path)
    assert narrow.lm_head.weight.dtype in (torch.bfloat16, torch.float16)
    wanted = ssmax_tensors(model)
    for name, value in ssmax_tensors(narrow).items():
        assert value.dtype == torch.float32 and torch.equal(value, wanted[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.pop("model.layers.1.self_attn.ssmax.s"),
            "lacks .*1.self_attn.ssmax.s",
        ),
        (
            lambda w: w.update({"model.layers.0.self_attn.ssmax.more": torch.zeros(4)}),
            "has too many: model.layers.0.self_attn.ssmax.more",
        ),
        (
            lambda w: w.update({"model.layers.0.self_attn.ssmax.bias": torch.zeros(7)}),
            r"has model.layers.0.self_attn.ssmax.bias \(7,\) instead of \(4,\)",
        ),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(7)}),
            r"has model.norm.weight \(7,\) instead of \(32,\)",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_the_layer(tmp_path, change, message):
    randomise(ssmax.hf.convert(build("llama"))).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        ssmax.hf.from_pretrained(tmp_path)


@torch.no_grad()
def test_options_of_the_config_are_the_configs(tmp_path):
    model = randomise(ssmax.hf.convert(build("llama")))
    model.save_pretrained(tmp_path)
    tokens = tokens_of()
    wanted = model(input_ids=tokens).logits
    own = transformers.LlamaConfig(**SHARED, use_cache=False)
    stored = ssmax.hf.from_pretrained(tmp_path).config
    stored.use_cache = False
    stored.save_pretrained(tmp_path / "stored")
    given = ({"config": own}, {"config": stored}, {"config": tmp_path / "stored"})
    for options in ({"use_cache": False}, *given):
        loaded = ssmax.hf.from_pretrained(tmp_path, **options).eval()
        assert loaded.config.use_cache is False
        assert torch.equal(loaded(input_ids=tokens).logits, wanted)
        assert ssmax.hf.verify(loaded).layers == 2
    assert not hasattr(own, "ssmax")
    with pytest.raises(TypeError, match="use_cahce"):
        ssmax.hf.from_pretrained(tmp_path, use_cahce=False)


def test_a_model_of_shapes_alone_is_loaded(tmp_path):
    ssmax.hf.convert(build("llama")).save_pretrained(tmp_path)
    assert ssmax.hf.from_pretrained(tmp_path, device_map="meta").device.type == "meta"


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


def test_an_adapter_of_some_layers_goes_onto_the_whole_model(tmp_path):
    some = ssmax.hf.convert(build("llama"), layers=lambda name, _: ".0." in name)
    ssmax.hf.save(some, tmp_path)
    values = json.loads((tmp_path / "ssmax.json").read_text())
    assert (values["attention_layers"], values["hidden_size"]) == (2, 32)
    assert ssmax.hf.verify(ssmax.hf.load(build("llama"), tmp_path)).layers == 1


def test_a_record_with_unknown_fields_is_refused(tmp_path):
    ssmax.hf.save(ssmax.hf.convert(build("llama")), tmp_path)
    values = json.loads((tmp_path / "ssmax.json").read_text())
    (tmp_path / "ssmax.json").write_text(json.dumps({**values, "shape": "round"}))
    with pytest.raises(ValueError, match="must be an object with .*'shape'"):
        ssmax.hf.load(build("llama"), tmp_path)


def test_what_convert_refuses_is_not_loaded_either(tmp_path):
    """Eager code that passes the interface by: see test_conversion.py."""
    model = randomise(ssmax.hf.convert(build("gpt2")))
    ssmax.hf.save(model, tmp_path / "adapter")
    model.save_pretrained(tmp_path / "whole")
    base = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**GPT2, reorder_and_upcast_attn=True)
    )
    with pytest.raises(ValueError, match="reorder_and_upcast_attn=False"):
        ssmax.hf.load(base, tmp_path / "adapter")
    with pytest.raises(ValueError, match="reorder_and_upcast_attn=False"):
        ssmax.hf.from_pretrained(tmp_path / "whole", reorder_and_upcast_attn=True)
    path = tmp_path / "whole" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "reorder_and_upcast_attn": True}))
    # As the message says.
    ssmax.hf.from_pretrained(tmp_path / "whole", reorder_and_upcast_attn=False)


@torch.no_grad()
def test_the_command_line_converts(tmp_path, capsys):
    from ssmax import cli

    base = build("llama")
    base.save_pretrained(tmp_path / "base")
    typed = ["convert", str(tmp_path / "base")]
    assert cli.run([*typed, str(tmp_path / "whole")]) == 0
    assert "2 attention layers converted and verified, 16 of" in capsys.readouterr().out
    tokens = tokens_of()
    loaded = ssmax.hf.from_pretrained(tmp_path / "whole").eval()
    assert torch.equal(loaded(input_ids=tokens).logits, base(input_ids=tokens).logits)
    options = ["--adapter", "--json", "--init", "paper", "--train-length", "64"]
    assert cli.run([*typed, str(tmp_path / "adapter"), *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["learned"] == 8 and told["layers"] == 2
    assert (told["rule"], told["init"]) == ("ssmax", "paper")
    ssmax.hf.load(build("llama"), tmp_path / "adapter")
    # A rule that learns nothing and is softmax up to its length needs no other init.
    options = ["--json", "--rule", "clamp", "--train-length", "64"]
    assert cli.run([*typed, str(tmp_path / "logn"), *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["learned"] == 0 and told["verified"]
    loaded = ssmax.hf.from_pretrained(tmp_path / "logn").eval()
    assert torch.equal(loaded(input_ids=tokens).logits, base(input_ids=tokens).logits)
    for more, message in (
        ([str(tmp_path / "whole")], "is not an empty folder"),
        ([str(tmp_path / "x"), "--layers", "all", "--attention", "cross"], "attention must be"),
    ):
        assert cli.run([*typed, *more]) == 2
        assert message in capsys.readouterr().err
    assert cli.run(["convert", str(tmp_path / "nowhere"), str(tmp_path / "x")]) == 2
    assert "there is no" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


# What is typed, and what the one line must say; test_bad_input.py has the rest.
WRONG_CHOICE = {
    "--init zero": "init must be one of identity, paper, anneal, got 'zero'",
    "--layers some": "layers must be 'full', 'all' or a function, got 'some'",
    "--train-length 1": "train_length must be a whole number of at least 2 tokens, got 1",
    "--no-bias": "init='identity' needs the bias",
}


def test_the_command_line_refuses_a_choice_before_it_reads_weights(tmp_path, capsys):
    from ssmax import cli

    build("llama").save_pretrained(tmp_path / "base")
    os.truncate(tmp_path / "base" / "model.safetensors", 1000)
    capsys.readouterr()
    for typed, wanted in WRONG_CHOICE.items():
        options = [str(tmp_path / "base"), str(tmp_path / "x"), *typed.split()]
        assert cli.run(["convert", *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert wanted in line


def test_the_command_line_says_where_no_layer_is_left(tmp_path, capsys):
    from ssmax import cli

    build("mistral").save_pretrained(tmp_path / "base")
    assert cli.run(["convert", str(tmp_path / "base"), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "layers='full', attention='self'" in said
    assert "try layers='all'" in said


def test_what_a_models_inputs_are_made_with_goes_with_it(tmp_path):
    """As it was, whatever it is: no package for pictures is needed, and no code is run."""
    from ssmax import cli

    base, out = tmp_path / "base", tmp_path / "out"
    build("llama").save_pretrained(base)
    transformers.WhisperFeatureExtractor().save_pretrained(base)
    own_code = {"auto_map": {"AutoProcessor": "theirs.Theirs"}}
    written = {
        "processor_config.json": json.dumps(own_code),
        "video_preprocessor_config.json": '{"size": 8}',
        "chat_template.json": '{"chat_template": "{{ messages }}"}',
        "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/tools.jinja": "{{ tools }}",
        "qformer_tokenizer/tokenizer_config.json": "{}",
        "theirs.py": "raise SystemExit('run')",
    }
    for name, text in written.items():
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(text)
    assert cli.run(["convert", str(base), str(out)]) == 0
    for name in [*written, "preprocessor_config.json"]:
        if name != "theirs.py":
            assert (out / name).read_bytes() == (base / name).read_bytes(), name
    assert not (out / "theirs.py").exists()
    assert transformers.AutoFeatureExtractor.from_pretrained(out).feature_size == 80


def test_inputs_of_a_model_of_the_hub_are_copied_from_there(tmp_path, monkeypatch):
    from ssmax.hf.inputs import copy_inputs

    home = tmp_path / "hub" / "models--theirs--model"
    snapshot = home / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    (snapshot / "preprocessor_config.json").write_text("{}")
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        value = True if name == "HF_HUB_OFFLINE" else str(tmp_path / "hub")
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    (tmp_path / "out").mkdir()
    copy_inputs("theirs/model", tmp_path / "out", transformers.LlamaConfig())
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == "{}"


def test_a_conversion_that_cannot_be_written_leaves_nothing(tmp_path, capsys, monkeypatch):
    from ssmax import cli

    def full(tokenizer, folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    build("llama").save_pretrained(tmp_path / "base")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 5}, "a"))
    known = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    known.save_pretrained(tmp_path / "base")
    typed = ["convert", str(tmp_path / "base"), str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        patched.setattr(type(known), "save_pretrained", full)
        assert cli.run(typed) == 1
    assert "No space left" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    assert cli.run(typed) == 0 and (tmp_path / "out" / "tokenizer.json").is_file()


def test_the_command_line_converts_what_it_cannot_verify_and_says_so(tmp_path, capsys):
    from ssmax import cli

    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        image_size=16, patch_size=4,
    )  # fmt: skip
    transformers.ViTModel(config).save_pretrained(tmp_path / "base")
    assert cli.run(["convert", str(tmp_path / "base"), str(tmp_path / "out")]) == 0
    first, second, _ = capsys.readouterr().out.splitlines()
    assert "2 attention layers converted, 16 of" in first
    assert second.startswith("not verified: ") and "inputs={'pixel_values': ...}" in second
    ssmax.hf.from_pretrained(tmp_path / "out")
    assert cli.run(["convert", str(tmp_path / "base"), str(tmp_path / "more"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layers"] == 2 and told["verified"] is False


def test_the_command_line_refuses_what_is_no_whole_model_in_one_line(tmp_path, capsys):
    from ssmax import cli

    build("llama").save_pretrained(tmp_path / "base")
    os.truncate(tmp_path / "base" / "model.safetensors", 1000)
    ssmax.hf.save(ssmax.hf.convert(build("llama")), tmp_path / "adapter")
    capsys.readouterr()
    for source, message in (
        ("base", "model.safetensors cannot be read"),
        ("adapter", "holds an adapter, s and b without the model that they are for"),
        ("nowhere", "there is no such folder"),
    ):
        assert cli.run(["convert", str(tmp_path / source), str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_a_converted_model_is_not_converted_again(tmp_path, capsys):
    from ssmax import cli

    # Nor one by a rule that has no tensors.
    ssmax.hf.convert(build("llama")).save_pretrained(tmp_path / "whole")
    clamp = ssmax.hf.convert(build("llama"), rule="clamp", train_length=8)
    clamp.save_pretrained(tmp_path / "clamp")
    for name in ("whole", "clamp"):
        assert cli.run(["convert", str(tmp_path / name), str(tmp_path / "twice")]) == 2
        assert "is converted already" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ssmax_scale", "ssmax_s", "SSMAX.weight", "softmax_scaler"])
def test_an_s_by_another_name_is_not_passed_over(tmp_path, name, capsys):
    from ssmax import cli

    build("llama").save_pretrained(tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights[f"model.layers.0.self_attn.{name}"] = torch.ones(4)
    save_file(weights, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    assert cli.run(["convert", str(tmp_path / "base"), str(tmp_path / "out")]) == 2
    assert "sounds like an s by another name and would be lost" in capsys.readouterr().err
