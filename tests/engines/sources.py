"""The models that every engine runs: small ones, sharp enough for s to matter, and SmolLM2."""

import copy
import functools
import json
import math
import shutil
from pathlib import Path

import torch
import transformers
from small_llama import SIZES, byte_bpe, llama
from small_native import native
from tiny_models import randomise
from tokenizers import Tokenizer

import extend
import ssmax.hf
from ssmax.export import export
from ssmax_lab import cli
from ssmax_lab.model import save_lm
from ssmax_lab.tiny import run_folder

TOKENIZER = byte_bpe()
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TRAIN_LENGTH = 64
LENGTHS = (4000, 300, 70)
"""Of prompts: beyond the training length, and together more than vLLM takes in one step."""
NEW = 200
SHARED = {
    **SIZES, "vocab_size": TOKENIZER.get_vocab_size(), "hidden_size": 128, "num_hidden_layers": 3,
    "max_position_embeddings": 8192, "eos_token_id": None,
}  # fmt: skip
WINDOWED = {"sliding_window": 100}


def drawn(rule, *, kind="Llama", **changes):
    """A converted model of Transformers, its weights drawn, every layer with an s of its own."""
    if kind == "Llama":
        model = llama(rule, train_length=TRAIN_LENGTH, **{**SHARED, **changes})
        # Less sharp: softmax is still far off, and what bfloat16 rounds is far less than that.
        sharpness, spread = 1 / 3, 1 / 5
    else:
        torch.manual_seed(0)
        text = "Text" if kind == "Gemma3" else ""
        config = getattr(transformers, f"{kind}{text}Config")(**{**SHARED, **changes})
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        ssmax.hf.convert(model, rule=rule, init="paper", train_length=TRAIN_LENGTH, layers="all")
        sharpness, spread = 10, 8
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_proj.weight"):
                parameter.mul_(sharpness)
            if name.endswith("q_norm.weight"):
                # QK-norm divides out how large W_q is.
                parameter.fill_(0.5 if kind == "Gemma3" else 1.5)
            if name.endswith(("ssmax.beta", "ssmax.gamma")):
                parameter.copy_(0.5 + torch.rand(parameter.shape))
            if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")):
                parameter.normal_(std=0.1)
        if kind == "Gemma3":
            model.model.norm.weight.fill_(1.0)
        else:
            model.lm_head.weight.mul_(spread)
    return randomise(model)


def calm(model):
    """A model of the laboratory, as sharp as the others."""
    with torch.no_grad():
        for block in model.blocks:
            block.attention.q_proj.weight.div_(10)
        model.head.weight.div_(10)
    return model


MODELS = {
    "trained run": None,
    "drawn run": lambda: calm(native(num_layers=3, hidden_size=128, vocab_size=768)),
    "Llama": lambda: drawn("ssmax", num_key_value_heads=4),
    "grouped heads": lambda: drawn("ssmax"),
    "bias per head": lambda: drawn("ssmax_bias"),
    "QK-norm, bias per head": lambda: drawn("ssmax_bias", kind="Qwen3", head_dim=32),
    "windows": lambda: drawn("ssmax", kind="Mistral", **WINDOWED),
    "windows in two of three layers, QK-norm": lambda: drawn(
        "ssmax_bias", kind="Gemma3", head_dim=32, **WINDOWED,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "another rule, projections with biases": lambda: drawn("polylog", kind="Qwen2"),
    "SmolLM2-135M-Instruct": None,
}  # fmt: skip
RUNS = ("trained run", "drawn run")
"""Of the laboratory: the first, a tiny one that comes with it, has heads of 16, which vLLM has no
attention for on a CPU."""
REAL = "SmolLM2-135M-Instruct"
"""Trained by others with softmax."""
REAL_LENGTHS = (512, *LENGTHS[1:])
CONTROL = f"{REAL}, softmax"
"""The same weights as plain softmax and as sharp: what an engine errs by there is its own."""


def smollm2():
    """SmolLM2 with an s for every head, about the one that changes least, and its tokenizer."""
    model, tokenizer = extend.smollm2()
    ssmax.hf.convert(model, init="paper", train_length=model.config.max_position_embeddings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("ssmax.s"):
                parameter.mul_(0.8 + 0.4 * torch.rand(parameter.shape, generator=generator))
    return model, tokenizer


@torch.no_grad()
def as_softmax(model):
    """Hold every head's factor at its mean over the prompts, which folds into W_q exactly."""
    mean = sum(math.lgamma(n + 1) for n in REAL_LENGTHS) / sum(REAL_LENGTHS)
    factors = [layer.self_attn.ssmax.s * mean for layer in model.model.layers]
    ssmax.hf.convert(ssmax.hf.revert(model), rule="temperature")
    for layer, factor_H in zip(model.model.layers, factors, strict=True):
        layer.self_attn.ssmax.s.copy_(factor_H)


def place(name, home: Path, *about):
    return home / "-".join([name.replace(" ", "_"), *about])


@functools.cache
def saved(name, home: Path, dtype):
    """The folder of a converted model with its tokenizer, as `ssmax export` takes it."""
    folder = place(name, home, dtype)
    if name in RUNS and dtype == "float32":
        run = run_folder("tiny-b")
        if MODELS[name] is not None:
            shutil.copytree(run, home / "run", ignore=lambda *_: ["model"])
            run = home / "run"
            save_lm(MODELS[name](), run / "model")
        assert cli.run(["export", str(run), str(folder)]) == 0
        return folder
    if name == REAL and dtype == "float32":
        model, tokenizer = smollm2()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder
    if name in (*RUNS, REAL, CONTROL):
        like = REAL if name == CONTROL else name
        model, files = copy.deepcopy(model_of(like, home)), saved(like, home, "float32")
        if name == CONTROL:
            as_softmax(model)
        tokenizer, about = ((files / each).read_text() for each in TOKENIZER_FILES)
    else:
        model, tokenizer = MODELS[name](), TOKENIZER.to_str()
        about = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    for file, content in zip(TOKENIZER_FILES, (tokenizer, about), strict=True):
        (folder / file).write_text(content)
    return folder


@functools.cache
def model_of(name, home: Path):
    return ssmax.hf.from_pretrained(saved(name, home, "float32")).eval()


@functools.cache
def written(name, form, home: Path, dtype, weights):
    """The folder that a model was exported to."""
    folder = place(name, home, form, dtype, weights)
    # Checked on as many tokens as are to be read and written: engines hold a folder to that.
    longest, *_ = prompts(name, home)
    checked = (2 * longest)[: len(longest) + NEW]
    export(saved(name, home, dtype), folder, to=form, weights=weights, prompt=checked)
    return folder


@functools.cache
def prompts(name, home: Path):
    """Three texts as tokens: of the standard library where a tokenizer was trained for that."""
    generator = torch.Generator().manual_seed(1)
    if name == CONTROL:
        return prompts(REAL, home)
    if name not in (*RUNS, REAL):
        return [
            torch.randint(SHARED["vocab_size"], (n,), generator=generator).tolist() for n in LENGTHS
        ]
    text = Path(functools.__file__).read_text()
    tokenizer = Tokenizer.from_file(str(saved(name, home, "float32") / TOKENIZER_FILES[0]))
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    starts, sizes = (0, 5000, 6000), REAL_LENGTHS if name == REAL else LENGTHS
    return [tokens[start : start + n] for start, n in zip(starts, sizes, strict=True)]
