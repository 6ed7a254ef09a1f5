"""The README.md that goes with an exported model."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssmax.export.exporting import Exported

_LOST = {
    "hf": "nothing",
    "ministral": (
        "rows padded on the left count their padding where positions do. s can no longer be "
        "trained on its own. Transformers calls original_max_position_embeddings an unrecognised "
        "key: it is read"
    ),
    "gguf": (
        "s can no longer be trained on its own; quantise further only with attn_q kept in "
        "float32, because s / beta underflows"
    ),
    "onnx": "training",
    "torch-export": "training",
}
_LOAD = {
    "hf": """```python
import ssmax.hf

model = ssmax.hf.from_pretrained(FOLDER)
```

Transformers alone runs the code in the folder: `AutoModelForCausalLM.from_pretrained(FOLDER,
trust_remote_code=True)`. So does `vllm serve FOLDER --trust-remote-code`; with `ssmax[vllm]`
installed vLLM runs Llama, Mistral, Qwen 2 and 3 and Gemma 3 without that flag.""",
    "ministral": """Without ssmax: `AutoModelForCausalLM.from_pretrained(FOLDER)` in Transformers,
`vllm serve FOLDER`, or mlx-lm. SGLang reads the same keys; our tests do not run it.""",
    "gguf": """```python
from llama_cpp import Llama

model = Llama("FOLDER/model.gguf", n_ctx=20480, type_k=0, type_v=0)  # a float32 cache
```

The cache is half-precision unless you say otherwise, and the logits then agree to fewer digits.""",
    "onnx": """`onnxruntime.InferenceSession("FOLDER/model.onnx")` takes `input_ids` (batch, new),
`attention_mask` (batch, cached + new; 0 for padding on the left), and `past_key_values.LAYER.key`
and `.value` (batch, key heads, cached, head_dim), with cached = 0 to begin with. It gives `logits`,
and `present.LAYER.key` and `.value`, the past of the next call.""",
    "torch-export": """```python
import torch

model = torch.export.load("FOLDER/model.pt2").module()  # needs no ssmax
logits, past = model(input_ids, attention_mask, past)
```

`past` is a list of keys and values of every layer in turn, (batch, key heads, cached, head_dim),
cached = 0 to begin with; `attention_mask` (batch, cached + new) is 0 for padding on the left.""",
}


def text(exported: "Exported") -> str:
    """Write what was folded, what is lost, how to load, and how well it agrees."""
    found = exported.agreement
    difference = f"{found.largest_difference:.2g} (largest logit {found.largest_logit:.3g})"
    kind = f"{exported.to}, {exported.weights}" if exported.to == "gguf" else exported.to
    by = ", the file's weights in Transformers' Ministral 3" if exported.to == "gguf" else ""
    return f"""# A Scalable-Softmax model, exported ({kind})

The attention logits of every query are multiplied by a factor, s log n + b with n the number of
keys that it sees ([arXiv 2501.19399](https://arxiv.org/abs/2501.19399)); s = 0 is a constant.

- s and b: {exported.how}.
- What is lost: {_LOST[exported.to]}.

## Load

{_LOAD[exported.to]}

## Checked against its source

{found.tokens:,} tokens through the cache, the last {found.decoded} one by one{by}.

| | |
|---|---|
| largest difference of a logit | {difference} |
| same likeliest token | {found.same_choice:.2%} of positions |
| loss | {found.exported_loss:.6f}, source {found.source_loss:.6f} |
"""
