"""The table of docs/audit.md anew: small models of families that scale queries, in real engines.

    python tools/audit_page.py vllm=PYTHON mlx-lm=PYTHON llama.cpp=PYTHON transformers=PYTHON

Each PYTHON is that of an environment with the engine. A family that build/audit has is not run
again; without arguments the table is written from there.
"""

import dataclasses
import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors.torch import load_file, save_file

import ssmax.hf
from ssmax._engines import parse
from ssmax._progress import logging_to_terminal
from ssmax.audit import audit, write_small
from ssmax.export import export

ROOT = Path(__file__).parent.parent
FOUND, PAGE = ROOT / "build" / "audit", ROOT / "docs" / "audit.md"
BEGIN, END = "<!-- written by tools/audit_page.py -->\n", "<!-- end -->\n"
STOCK = ("transformers", "vllm", "mlx-lm")
WORDS = {"another n": "**another n**", "dropped": "**dropped**"}


def of_type(config: Any) -> Callable[[Path], Path]:
    """A small random model of a family as Transformers configures it."""

    def make(home: Path) -> Path:
        (home / "config").mkdir(parents=True)
        config.save_pretrained(home / "config")
        return write_small(home / "config", home / "small")

    return make


def shorter(kind: type, length: int = 2048) -> Any:
    """A family's config whose scale begins sooner: engines on a CPU need minutes for 16,384."""
    config = kind()
    config.rope_parameters["original_max_position_embeddings"] = length
    return config


def ministral3_with_both_keys(home: Path) -> Path:
    folder = of_type(shorter(transformers.Ministral3Config))(home)
    return changed(folder, llama_4_scaling={"beta": 0.1, "original_max_position_embeddings": 2048})


def llama4(home: Path) -> Path:
    """With theta where Transformers 4 wrote it, as published checkpoints have it."""
    return changed(of_type(transformers.Llama4TextConfig())(home), rope_theta=500_000.0)


def as_file(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """Write beside a small Ministral 3 or Llama 4 the file that llama.cpp reads."""

    def write(home: Path) -> Path:
        folder = make(home)
        values = json.loads((folder / "config.json").read_text())
        architecture = {
            "ministral3": gguf.MODEL_ARCH.MISTRAL3,
            "llama4_text": gguf.MODEL_ARCH.LLAMA4,
        }[values["model_type"]]
        (home / "gguf").mkdir()
        writer = gguf.GGUFWriter(home / "gguf" / "model.gguf", gguf.MODEL_ARCH_NAMES[architecture])
        writer.add_vocab_size(values["vocab_size"])
        writer.add_tokenizer_model("none")
        writer.add_context_length(values["max_position_embeddings"])
        writer.add_embedding_length(values["hidden_size"])
        writer.add_block_count(values["num_hidden_layers"])
        writer.add_head_count(values["num_attention_heads"])
        writer.add_head_count_kv(values["num_key_value_heads"])
        writer.add_key_length(values["head_dim"])
        writer.add_value_length(values["head_dim"])
        writer.add_rope_dimension_count(values["head_dim"])
        writer.add_rope_freq_base(values["rope_parameters"]["rope_theta"])
        writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
        is_llama4 = architecture == gguf.MODEL_ARCH.LLAMA4
        if is_llama4:
            writer.add_feed_forward_length(values["intermediate_size_mlp"])
            writer.add_interleave_moe_layer_step(values["interleave_moe_layer_step"])
            writer.add_expert_feed_forward_length(values["intermediate_size"])
            writer.add_expert_count(values["num_local_experts"])
            writer.add_expert_used_count(values["num_experts_per_tok"])
        else:
            rope = values["rope_parameters"]
            writer.add_feed_forward_length(values["intermediate_size"])
            writer.add_float32("mistral3.attention.temperature_scale", rope["llama_4_scaling_beta"])
            writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        names = gguf.get_tensor_name_map(architecture, values["num_hidden_layers"])
        for name, tensor in load_file(folder / "model.safetensors").items():
            if not is_llama4 and ("q_proj" in name or "k_proj" in name):
                # llama.cpp rotates neighbours, this layout those half a head apart.
                heads = tensor.unflatten(0, (-1, 2, values["head_dim"] // 2))
                tensor = heads.transpose(1, 2).flatten(0, 2).contiguous()
            writer.add_tensor(names.get_name(name, (".weight",)), tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return folder

    return write


def plain_ministral3(home: Path) -> Path:
    """Without YaRN."""
    config = transformers.Ministral3Config()
    config.rope_parameters = {
        "rope_type": "default", "rope_theta": 1e6, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 2048,
    }  # fmt: skip
    return of_type(config)(home)


def mistral(home: Path) -> Path:
    """Weights of a Ministral 3 under the class of a Mistral, as text-only checkpoints have it."""
    return changed(
        plain_ministral3(home),
        model_type="mistral",
        architectures=["MistralForCausalLM"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rope_theta=1e6,
        llama_4_scaling={"beta": 0.1, "original_max_position_embeddings": 2048},
    )


def changed(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def qwen(home: Path) -> Path:
    """A first Qwen out of a small Qwen 2."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = transformers.Qwen2Config(num_key_value_heads=32, rope_parameters=rope)
    folder = of_type(config)(home)
    write_first_qwen(transformers.Qwen2ForCausalLM.from_pretrained(folder), folder)
    return folder


def write_first_qwen(model: Any, folder: Path, **changes: Any) -> None:
    """Write a Qwen 2 whose queries each have a key head of their own as a first Qwen."""
    weights = model.state_dict()
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            tensor = torch.cat([weights[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
        for ours, theirs in {
            "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f",
            "model.layers": "transformer.h", "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2", "self_attn.o_proj": "attn.c_proj",
            "self_attn.q_proj": "attn.c_attn", "mlp.up_proj": "mlp.w1", "mlp.gate_proj": "mlp.w2",
            "mlp.down_proj": "mlp.c_proj",
        }.items():  # fmt: skip
            name = name.replace(ours, theirs)
        renamed[name] = tensor.contiguous()
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    heads = config.num_attention_heads
    values = {
        "model_type": "qwen", "architectures": ["QWenLMHeadModel"],
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": 2 * config.intermediate_size, "num_attention_heads": heads,
        "num_hidden_layers": config.num_hidden_layers, "kv_channels": config.hidden_size // heads,
        "max_position_embeddings": 8192, "layer_norm_epsilon": 1e-6, "rotary_emb_base": 10000,
        "no_bias": True, "seq_length": 2048, "use_logn_attn": True, "use_dynamic_ntk": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values | changes))


def converted(home: Path, rule: str = "ssmax") -> Path:
    """A small Llama with a random s, or s and b, for every head."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=192, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ssmax.hf.convert(model, rule=rule, init="paper", train_length=1024)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_proj.weight"):
                parameter.mul_(40)
            if ".ssmax." in name:
                parameter.uniform_(0.1, 0.3)
        model.lm_head.weight.mul_(20)
    model.save_pretrained(home / "converted")
    return home / "converted"


def as_ministral(home: Path) -> Path:
    source = converted(home)
    export(source, home / "gguf", to="gguf")
    export(source, home / "out", to="ministral")
    return home / "out"


def as_hf(home: Path) -> Path:
    export(converted(home, "ssmax_bias"), home / "out", to="hf")
    return home / "out"


CASES: dict[str, tuple[str, Callable[[Path], Path], tuple[str, ...], dict[str, Any]]] = {
    "ministral3": (
        "Ministral 3", of_type(transformers.Ministral3Config()), ("transformers", "vllm"), {}
    ),
    "ministral3-2048": (
        "Ministral 3, M = 2,048", of_type(shorter(transformers.Ministral3Config)), ("mlx-lm",), {}
    ),
    "both-keys": (
        "Ministral 3, M = 2,048, `llama_4_scaling` beside it", ministral3_with_both_keys, STOCK, {}
    ),
    "plain": (
        "Ministral 3, M = 2,048, without YaRN", as_file(plain_ministral3), ("llama.cpp",), {}
    ),
    "mistral": ("Mistral with `llama_4_scaling`", mistral, STOCK, {}),
    "llama4": ("Llama 4", as_file(llama4), (*STOCK, "llama.cpp"), {}),
    "llama4-16k": (
        "Llama 4, at most 16,384 tokens", llama4, ("vllm",),
        {"max_length": 16_384},
    ),
    "mistral4": (
        "Mistral 4, M = 2,048", of_type(shorter(transformers.Mistral4Config)), STOCK, {}
    ),
    "beam": ("Beam", of_type(transformers.BeamConfig()), STOCK, {"tokens": 4096}),
    "qwen": ("Qwen (the first)", qwen, STOCK, {}),
    "ministral": (
        "ours, `ministral` and `gguf`", as_ministral, (*STOCK, "llama.cpp"), {"tokens": 2048}
    ),
    "hf": ("ours, `hf`", as_hf, ("transformers",), {"tokens": 2048}),
}  # fmt: skip


def main(given: list[str]) -> None:
    FOUND.mkdir(parents=True, exist_ok=True)
    pythons = dict(parse(text, ("transformers", "vllm", "mlx-lm", "llama.cpp")) for text in given)
    for case, (name, make, engines, options) in CASES.items():
        for engine in engines:
            path = FOUND / f"{case}-{engine}.json"
            if engine not in pythons or path.exists():
                continue
            home = FOUND / f"model-{case}"
            done = home / "folder"
            if not done.exists():
                done.write_text(str(make(home)))
            folder = Path(done.read_text())
            gguf = home / "gguf" / "model.gguf" if engine == "llama.cpp" else None
            wanted = f"{engine}={pythons[engine]}"
            found = audit(folder, engines=[wanted], gguf=gguf, **options)
            about = {**dataclasses.asdict(found), "model": name}
            about["date"] = datetime.date.today().isoformat()
            path.write_text(json.dumps(about, indent=2))
            print(name, engine, found.verdicts[0].finding, found.verdicts[0].why, flush=True)
    write_page()


def write_page() -> None:
    engines = dict.fromkeys(engine for _, _, asked, _ in CASES.values() for engine in asked)
    rows, dates, versions = [], set(), {}
    for case in CASES:
        cells = dict.fromkeys(engines, "")
        for engine in engines:
            path = FOUND / f"{case}-{engine}.json"
            if not path.exists():
                continue
            found = json.loads(path.read_text())
            (verdict,) = found["verdicts"]
            dates.add(found["date"])
            if verdict["version"]:
                versions[engine] = verdict["version"]
            cells[engine] = said(verdict)
            about = f"{found['model']} | `{found['formula']}` | {found['tokens']:,}"
        if any(cells.values()):
            rows.append(f"| {about} | {' | '.join(cells.values())} |")
    head = f"| model | declared factor | tokens | {' | '.join(engines)} |"
    when = " and ".join(sorted(dates))
    run = ", ".join(f"{engine} {version}" for engine, version in versions.items())
    lines = [head, "|---" * (3 + len(engines)) + "|", *rows, "", f"Run on {when}, on a CPU: {run}."]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}" + "\n".join(lines) + f"\n{END}{after}")


def said(verdict: dict[str, Any]) -> str:
    if verdict["why"].startswith("it does not run"):
        return "does not run"
    return WORDS.get(verdict["finding"], verdict["finding"])


if __name__ == "__main__":
    with logging_to_terminal():
        main(sys.argv[1:])
