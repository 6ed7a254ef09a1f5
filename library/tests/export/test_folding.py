"""SSMax in a stock Ministral 3: what folds is exact, what does not is refused with a way out."""

import copy
import json
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file
from small_llama import llama
from tiny_models import SHARED, build, randomise, tokens_of

import ssmax.hf
from ssmax.export import export
from ssmax.export.folding import BETA, fold, llama_form, nearest_without_bias
from ssmax.testing.budget import assert_no_worse_than

# Longer than any training length here.
TOKENS = tokens_of(batch=1, length=200)
ALONE = """
import sys
sys.modules["ssmax"] = None  # importing it fails
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Ministral3ForCausalLM

tokens = torch.tensor([eval(sys.argv[1])])
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is Ministral3ForCausalLM
    with torch.no_grad():
        whole = model(tokens).logits
        first = model(tokens[:, :150], use_cache=True)
        steps, cache = [first.logits], first.past_key_values
        for token in tokens[:, 150:].split(1, dim=1):
            steps.append(model(token, past_key_values=cache, use_cache=True).logits)
    save_file({"whole": whole, "steps": torch.cat(steps, 1)}, folder + "/logits")
"""


def converted(name="llama", **options):
    return randomise(ssmax.hf.convert(build(name), **options))


def with_ratio(model, ratio):
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("ssmax.s"):
                bias = model.get_parameter(key.removesuffix("s") + "bias")
                parameter.copy_(ratio * bias)
    return model


SOURCES = {
    "s log n": llama,
    "softmax": lambda: llama("softmax"),
    "temperature": lambda: llama("temperature"),
    "log n / log L": lambda: llama("entropy_invariant"),
    "one s / b": lambda: with_ratio(llama("ssmax_bias"), 0.7),
    "one s / b below 0": lambda: with_ratio(converted(), -0.3),
}
FITTED = ("s log n", "log n / log L")
"""Without a bias: there is no beta that is exact."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    home = tmp_path_factory.mktemp("exported")
    folders = {source: home / str(number) for number, source in enumerate(SOURCES)}
    for source, folder in folders.items():
        export(SOURCES[source](), folder, to="ministral", prompt=TOKENS[0])
    return folders


@pytest.fixture(scope="module")
def computed_alone(exported):
    """The exported models' logits, from a process that has no ssmax."""
    command = [sys.executable, "-c", ALONE, str(TOKENS[0].tolist()), *map(str, exported.values())]
    subprocess.run(command, capture_output=True, check=True)
    return {source: load_file(folder / "logits") for source, folder in exported.items()}


@torch.no_grad()
@pytest.mark.parametrize("source", SOURCES)
def test_a_stock_ministral_computes_the_same_where_ssmax_is_not(source, computed_alone):
    model = SOURCES[source]()
    eager, exact = model(TOKENS).logits, copy.deepcopy(model).double()(TOKENS).logits
    softmax = ssmax.hf.revert(model)(TOKENS).logits
    does = (eager - softmax).abs().max()
    for name, logits in computed_alone[source].items():
        if source in FITTED:
            # What the fit over n leaves of s / beta, in what SSMax does to the logits.
            assert (logits - eager).abs().max() < 1e-4 * does, name
        else:
            assert_no_worse_than(logits, eager, exact, name=name)
    if source != "softmax":
        assert does > 1e3 * (eager - exact).abs().max()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source", SOURCES)
def test_a_narrow_type_holds_what_is_folded(source, dtype, exported):
    """Engines take float16 or bfloat16 by themselves: no worse than either does to the source."""
    model = SOURCES[source]()
    stock = transformers.AutoModelForCausalLM.from_pretrained(exported[source], dtype=dtype)
    logits = stock(TOKENS).logits
    assert logits.isfinite().all()
    exact, narrow = model(TOKENS).logits, copy.deepcopy(model).to(dtype)(TOKENS).logits
    assert_no_worse_than(logits.float(), narrow.float(), exact, slack=2.0)


def test_one_configuration_is_for_every_engine(exported):
    """vLLM reads the factor at the top of config.json, Transformers beside the rotation."""
    folder = exported["s log n"]
    values = json.loads((folder / "config.json").read_text())
    assert values["llama_4_scaling"] == {"beta": BETA, "original_max_position_embeddings": 1}
    rope = values["rope_parameters"]
    assert (rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"]) == (BETA, 1)
    assert not [path for path in folder.iterdir() if path.is_dir()]


def test_the_source_is_left_as_it_was(tmp_path):
    """Folding shares the factor between W_q and W_k of the copy alone."""
    model = converted(init="paper", train_length=64)
    before = copy.deepcopy(model.state_dict())
    export(model, tmp_path / "out", to="ministral", prompt=TOKENS[0])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_tied_embeddings_stay_tied(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHARED, tie_word_embeddings=True)
    model = ssmax.hf.convert(transformers.LlamaForCausalLM(config), init="paper", train_length=64)
    for to in ("ministral", "gguf"):
        export(model, tmp_path / to, to=to, prompt=TOKENS[0])
    assert "lm_head.weight" not in load_file(tmp_path / "ministral" / "model.safetensors")


def test_a_free_bias_is_refused_or_fitted_and_the_cost_measured(tmp_path):
    model = llama("ssmax_bias")
    with pytest.raises(ValueError, match="bias of its own.*hf, onnx.*--fit.*anneal"):
        export(model, tmp_path / "out", to="ministral")
    done = export(model, tmp_path / "out", to="ministral", fit=True)
    found = done.agreement
    assert "fitted" in done.how and found.exported_loss != found.source_loss
    assert f"{found.exported_loss:.6f}" in (tmp_path / "out" / "README.md").read_text()


def test_a_bias_is_fitted_over_the_models_positions_where_no_length_was_told(tmp_path):
    done = export(converted(), tmp_path / "out", to="ministral", fit=True, prompt=TOKENS[0])
    assert f"over n = 1..{SHARED['max_position_embeddings']} " in done.how


def test_the_fitted_s_is_the_nearest():
    s, b, log_n = torch.tensor([0.4]), torch.tensor([0.3]), torch.arange(1, 65).double().log()
    fitted = nearest_without_bias(s.double(), b.double(), 64)

    def error(guess):
        return (guess * log_n - s * log_n - b).square().sum()

    assert error(fitted) < min(error(fitted + 1e-3), error(fitted - 1e-3))


def test_anneal_with_its_bias_frozen_ends_at_a_form_that_folds():
    model = ssmax.hf.convert(build("llama"), init="anneal", train_length=64)
    steps = 1000
    for step in range(steps):
        ssmax.hf.anneal(model, (step + 1) / steps, step / steps)
    form = llama_form(model)
    assert form.b_LH.any() and fold(form).beta == BETA


def windowed(**options):
    config = transformers.MistralConfig(**SHARED, sliding_window=6)
    return ssmax.hf.convert(transformers.MistralForCausalLM(config), **options)


def of_rope_llama3():
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    config = transformers.LlamaConfig(**SHARED, rope_parameters=rope)
    return ssmax.hf.convert(transformers.LlamaForCausalLM(config))


def with_projection_bias():
    config = transformers.LlamaConfig(**SHARED, attention_bias=True)
    return ssmax.hf.convert(transformers.LlamaForCausalLM(config))


REFUSED = {
    "a rule that is not affine": (lambda: llama("clamp"), "not s log n.*torch-export"),
    "QK-norm": (lambda: converted("qwen3"), "Qwen3ForCausalLM is no Llama.*form hf keeps"),
    "a window": (lambda: windowed(layers="all"), "window of 6.*torch-export"),
    "half converted": (
        lambda: ssmax.hf.convert(build("llama"), layers=lambda name, _: ".0." in name),
        "some are not.*torch-export",
    ),
    "another rotation": (of_rope_llama3, "rotation is of type 'linear'.*form hf"),
    "biases of projections": (with_projection_bias, "projections have biases.*torch-export"),
    "not converted": (lambda: build("llama"), "not converted.*ssmax.hf.convert"),
}


@pytest.mark.parametrize("to", ["ministral", "gguf"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_expressed_is_refused_with_a_way_out(case, to, tmp_path):
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        export(make(), tmp_path / "out", to=to)
    assert list(tmp_path.iterdir()) == []


class EngineOfTheContract:
    """What vLLM's Ministral does: a Llama whose query is scaled by `config.llama_4_scaling`."""

    def __init__(self, folder):
        values = json.loads((folder / "config.json").read_text())
        assert values["architectures"] == ["Ministral3ForCausalLM"]
        self.scaling = values["llama_4_scaling"]
        config = transformers.MistralConfig(**{**values, "model_type": "mistral"})
        assert config.sliding_window is None
        self.model = transformers.MistralForCausalLM(config).eval()
        self.model.load_state_dict(load_file(folder / "model.safetensors"))
        for layer in self.model.model.layers:
            layer.self_attn.q_proj.register_forward_hook(self.scale)

    def scale(self, _module, _inputs, query):
        # Before the rotation instead of after it: both are linear, and the rotation keeps lengths.
        positions = torch.arange(query.shape[1])
        steps = torch.floor(positions / self.scaling["original_max_position_embeddings"])
        scale = 1 + self.scaling["beta"] * torch.log(1 + steps)
        return (query * scale.unsqueeze(-1)).to(query.dtype)


def test_an_engine_of_the_documented_contract_of_vllm_computes_the_same(exported):
    with torch.no_grad():
        logits = EngineOfTheContract(exported["s log n"]).model(TOKENS).logits
        stock = transformers.AutoModelForCausalLM.from_pretrained(exported["s log n"])
        eager, exact = stock(TOKENS).logits, stock.double()(TOKENS).logits
    assert_no_worse_than(logits, eager, exact)
