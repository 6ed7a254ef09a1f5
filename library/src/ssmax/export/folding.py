"""SSMax as the attention temperature of Ministral 3: what can be folded into W_q, and what not.

Ministral 3 multiplies the query at position p by 1 + beta log(1 + floor(p / M)). With M = 1 that is
1 + beta log n for causal attention without windows and padding, and

    s log n + b = b (1 + beta log n)           where s / b = beta in every head of every layer,
    s log n     = s / beta (1 + beta log n)    but for s / beta, with a large beta, where b = 0.

The part before the bracket goes into the rows of W_q that make the head. In the second case it is
shared with W_k, so that no weight, query, key or factor leaves the range of float16.
"""

# L layers, H query heads, D head_dim, C model width

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ssmax.errors import UsageError
from ssmax.hf.conversion import must_be_converted
from ssmax.hf.hook import ATTRIBUTE
from ssmax.hf.layers import window_of
from ssmax.nn import RULES
from ssmax.ops.scale import Number

BETA = 2.0**12
"""Where b = 0. An engine may make the factor in float16: 1 + beta log n stays below 65,504 for any
n up to 8 million. What is too much, s / beta, is fitted away: in the factor of n = 2 three
parts in 10,000 remain, from n = 50 on three in 100,000, where float16 rounds by five in 10,000."""
KEY_SHARE = 2.0**-6
"""Of 1 / beta, what the rows of W_k take; those of W_q take the rest and s."""
NEGLIGIBLE = 1e-4
"""A b below this share of s is none: rounding in 1,000 steps of `anneal` leaves a third of it."""
KEEPS_ALL = "the forms onnx and torch-export keep it"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LlamaForm:
    """A model as Llama's weights and configuration, with s and b of every head beside them."""

    weights: dict[str, Tensor]
    config: dict[str, Any]
    s_LH: Tensor
    b_LH: Tensor
    train_length: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Folded:
    """Weights with the heads' share of the factor in W_q, and the beta that does the rest."""

    weights: dict[str, Tensor]
    config: dict[str, Any]
    """Llama's, without what concerns the scale."""
    beta: float
    how: str
    """What was folded, in words."""
    is_exact: bool


def fold(form: LlamaForm, *, fit: bool = False) -> Folded:
    """Fold s and b into W_q; a bias that cannot go there is an error unless `fit` gives it up."""
    s_LH, b_LH = form.s_LH, form.b_LH
    lead = b_LH.abs().argmax()
    ratio = (s_LH.flatten()[lead] / b_LH.flatten()[lead]).item()
    has_bias = bool((b_LH.abs() > NEGLIGIBLE * s_LH.abs()).any())
    is_exact, key_share = True, 1.0
    # Where a b that is nothing but rounding is the same in all heads, its ratio would be huge.
    if has_bias and torch.allclose(s_LH, ratio * b_LH, rtol=1e-6, atol=0.0):
        beta, rows_LH, how = ratio, b_LH, "b of every head; s / b is beta in all of them"
    elif fit or not has_bias:
        beta, key_share, is_exact = BETA, KEY_SHARE, not has_bias
        s_LH = nearest_without_bias(s_LH, b_LH - s_LH / beta, form.train_length)
        rows_LH = s_LH / (beta * key_share)
        how = f"s of every head, fitted to s log n + b over n = 1..{form.train_length}"
    else:
        raise UsageError(
            "every head has a bias of its own, and the engines' factor 1 + beta log n has one "
            "ratio for all. The forms hf, onnx and torch-export keep it; --fit writes the nearest "
            "form without bias and measures what that costs; training that ends at b = 0 (init "
            "'paper', or 'anneal' with the bias frozen) needs neither"
        )
    weights = dict(form.weights)
    for layer, rows_H in enumerate(rows_LH):
        for part, shares in (("q", rows_H), ("k", torch.tensor([key_share]))):
            name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
            wide = weights[name].double().unflatten(0, (shares.shape[0], -1))
            folded = (wide * shares[:, None, None].to(wide.device)).flatten(0, 1)
            weights[name] = folded.to(weights[name].dtype)
    return Folded(weights=weights, config=form.config, beta=beta, how=how, is_exact=is_exact)


def nearest_without_bias(s_LH: Tensor, b_LH: Tensor, length: int) -> Tensor:
    """Find the s whose s log n is nearest to s log n + b in the squared mean over n = 1..length."""
    log_n = torch.arange(1, length + 1, dtype=torch.float64).log()
    return s_LH + b_LH * (log_n.sum() / log_n.square().sum())


def llama_form(model: Any) -> LlamaForm:
    """Bring a converted model into Llama's layout; raise with the reason where it has none."""
    record = must_be_converted(model)
    kind = type(model).__name__
    config = model.config
    if kind not in ("LlamaForCausalLM", "MistralForCausalLM"):
        raise UsageError(
            f"{kind} is no Llama: its attention or norms have parts (QK-norm, biases, windows) "
            f"that Ministral 3 lacks; the form hf keeps everything, and {KEEPS_ALL}"
        )
    if config.rope_parameters.get("rope_type", "default") != "default":
        raise UsageError(
            f"its rotation is of type {config.rope_parameters['rope_type']!r}, and Ministral 3 "
            f"keeps M where that type keeps its length; the form hf, and {KEEPS_ALL}"
        )
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        raise UsageError(f"its projections have biases, Ministral 3's have none; {KEEPS_ALL}")
    attentions = [layer.self_attn for layer in model.model.layers]
    if any(window_of(attention) is not None for attention in attentions):
        raise UsageError(
            f"its layers have a window of {config.sliding_window}, and the engines' factor grows "
            f"past it; {KEEPS_ALL}"
        )
    if any(not hasattr(attention, ATTRIBUTE) for attention in attentions):
        raise UsageError(
            "some of its layers are converted and some are not, and the engines scale all alike; "
            f"{KEEPS_ALL}"
        )
    weights = {
        name: tensor for name, tensor in model.state_dict().items() if f".{ATTRIBUTE}." not in name
    }
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    affine = RULES[record.rule].affine
    if affine is None:
        raise UsageError(
            f"the rule {record.rule!r} is not s log n + b, which is all that the engines' factor "
            f"can be; {KEEPS_ALL}"
        )
    scales = [attention.ssmax for attention in attentions]
    s_LH, b_LH = (
        torch.stack([_per_head(affine(scale)[part], scale.num_heads) for scale in scales])
        for part in (0, 1)
    )
    length = record.train_length or config.max_position_embeddings
    return LlamaForm(
        weights=weights, config=config.to_dict(), s_LH=s_LH, b_LH=b_LH, train_length=length
    )


def _per_head(value: Number | None, num_heads: int) -> Tensor:
    value = torch.as_tensor(0.0 if value is None else value)
    return value.detach().cpu().double().expand(num_heads)
