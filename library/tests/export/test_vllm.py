"""vLLM itself on what was exported, by its plain command. `make test-engines` installs it."""

import copy
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from small_llama import byte_bpe, llama
from transformers import AutoModelForCausalLM

import ssmax.hf
from ssmax.export import export

PYTHON = os.environ.get("VLLM_PYTHON")
"""Of an environment with vLLM, which pins other packages than ours."""
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(PYTHON is None, reason="needs vLLM; make test-engines installs it"),
]
RUN = Path(__file__).with_name("run_vllm.py")
TOKENIZER = byte_bpe()
TRAIN_LENGTH, NEW = 64, 60
LENGTHS = (300, 2000, 3000)
"""Together more than the 4,096 tokens that vLLM takes in one step, so that it cuts a prompt."""
PLAIN = {
    "ministral": {},
    "hf": {"model_impl": "transformers", "trust_remote_code": True},
}
"""What the documented command of a form says beside the folder."""
CASES = {
    "ministral": ("ministral", "ssmax", {"num_key_value_heads": 4}),
    "ministral, grouped heads": ("ministral", "ssmax", {"num_key_value_heads": 2}),
    "hf, a bias for every head": ("hf", "ssmax_bias", {"num_key_value_heads": 2}),
}


def model_of(rule, sizes):
    model = llama(
        rule, train_length=TRAIN_LENGTH, vocab_size=TOKENIZER.get_vocab_size(), hidden_size=128,
        num_hidden_layers=3, max_position_embeddings=4096, **sizes,
    )  # fmt: skip
    with torch.no_grad():
        # Less sharp: softmax is still far off, and what bfloat16 rounds is far less than that.
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.div_(3)
        model.lm_head.weight.div_(5)
    return model


@torch.no_grad()
def log_probabilities(model, texts):
    return [model(torch.tensor([text])).logits[0].double().log_softmax(-1) for text in texts]


def of_each_token(rows, texts):
    """Log-probabilities of all tokens but the first, all texts in a row."""
    found = [
        row[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0]
        for row, text in zip(rows, texts, strict=True)
    ]
    return torch.cat(found)


def run_vllm(folder, prompts, options, tmp_path):
    job = {"folder": str(folder), "options": options, "prompts": prompts, "new": NEW}
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [PYTHON, RUN, tmp_path / "job.json", tmp_path / "found.json"]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
    }  # fmt: skip
    done = subprocess.run(
        [str(each) for each in command],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads((tmp_path / "found.json").read_text())


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("case", CASES)
def test_vllm_computes_what_we_do_by_its_plain_command(case, dtype, tmp_path, capsys):
    """Prompts in chunks, single steps and cached prefixes, far beyond the training length."""
    form, rule, sizes = CASES[case]
    source, folder = model_of(rule, sizes), tmp_path / "out"
    export(source, folder, to=form, tokenizer=TOKENIZER.to_str())
    generator = torch.Generator().manual_seed(1)
    size = TOKENIZER.get_vocab_size()
    prompts = [torch.randint(size, (n,), generator=generator).tolist() for n in LENGTHS]
    options = PLAIN[form] if dtype is None else {**PLAIN[form], "dtype": dtype}
    found = run_vllm(folder, prompts, options, tmp_path)
    assert found["chunked_prefill"] and found["prefix_caching"]
    assert found["batched_tokens"] < sum(LENGTHS)

    each = found["prompts"]
    texts = [prompt + one["new"] for prompt, one in zip(prompts, each, strict=True)]
    theirs = torch.tensor([x for one in each for x in one["logprobs"]])
    exact = log_probabilities(copy.deepcopy(source).double(), texts)
    wanted = of_each_token(exact, texts)
    used = getattr(torch, found["dtype"].removeprefix("torch."))
    load = ssmax.hf.from_pretrained if form == "hf" else AutoModelForCausalLM.from_pretrained
    stock = of_each_token(log_probabilities(load(folder, dtype=used).eval(), texts), texts)
    softmax = ssmax.hf.revert(copy.deepcopy(source))
    error, allowed, of_softmax = (
        (one - wanted).abs()
        for one in (theirs, stock, of_each_token(log_probabilities(softmax, texts), texts))
    )
    # Their choice after their own tokens, so that one near tie does not count sixty times.
    choices = [row[n - 1 : -1].argmax(-1).tolist() for row, n in zip(exact, LENGTHS, strict=True)]
    same = sum(
        x == y for ours, one in zip(choices, each, strict=True)
        for x, y in zip(ours, one["new"], strict=True)
    )  # fmt: skip
    with capsys.disabled():
        print(
            f"\n| vLLM {found['version']}, {found['model'][0]} | {case} "
            f"| {found['dtype'].removeprefix('torch.')}{'' if dtype else ' (default)'} "
            f"| {error.max():.2g} | {error.mean():.2g} | {allowed.max():.2g} "
            f"| {allowed.mean():.2g} | {of_softmax.mean():.2g} | {same} of {NEW * len(LENGTHS)} |"
        )
    assert all(one["cached"] > n // 2 for one, n in zip(each, LENGTHS, strict=True))
    assert all(len(set(one["new"])) > NEW / 6 for one in each)  # no loop of a few tokens
    assert error.mean() < 2 * allowed.mean() and error.max() < 4 * allowed.max()
    assert error.mean() < of_softmax.mean() / 5
    if used == torch.float32:
        assert same == NEW * len(LENGTHS)
        assert all(one["new_from_cache"] == one["new"] for one in each)
