"""The options of a conversion, checked without torch."""

import math
from typing import Literal, get_args

from ssmax.errors import UsageError
from ssmax.nn.rules import RULES
from ssmax.ops.length import check_length

Init = Literal["identity", "paper", "anneal"]
INITS: tuple[str, ...] = get_args(Init)
Positions = Literal["auto", "base", "yarn", "none"]
POSITIONS: tuple[str, ...] = get_args(Positions)
SHARPENS = ("auto", "clamp", "yarn", "none")
LAYERS, ATTENTIONS = ("full", "all"), ("self", "all")


def check_choice(rule: str, init: str, train_length: int | None, bias: bool | None) -> str:
    """Find the rule that the choice amounts to; raise where it is none, or a length is missing."""
    if init not in INITS:
        raise UsageError(f"init must be one of {', '.join(INITS)}, got {init!r}")
    if rule not in RULES:
        raise UsageError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    if train_length is not None:
        check_length(train_length, "train_length")
    record, with_bias = RULES[rule], RULES[rule].with_bias
    starts_at_one = init in ("identity", "anneal")
    needs_length = record.needs_length and not (init == "identity" and with_bias)
    if train_length is None and (needs_length or init == "anneal"):
        raise UsageError(
            f"rule={rule!r} with init={init!r} needs train_length, the length that the model was "
            "trained at (not max_position_embeddings, which may be longer); for example "
            "train_length=4096"
        )
    if with_bias is None:
        if init == "anneal" or bias is not None:
            what = "init='anneal'" if init == "anneal" else f"bias={bias}"
            raise UsageError(f"{what} belongs to rule='ssmax', not to {rule!r}")
        if init == "identity" and not record.starts_as_softmax:
            raise UsageError(
                f"rule={rule!r} does not start as softmax; pass init='paper' for its own "
                "first values"
            )
        return rule
    if rule == with_bias and bias is False:
        raise UsageError(f"rule={rule!r} has a bias; for none pass rule='ssmax'")
    has_bias = (rule == with_bias or starts_at_one) if bias is None else bias
    if starts_at_one and not has_bias:
        raise UsageError(f"init={init!r} needs the bias: s = 0 without one would see nothing")
    return with_bias if has_bias else rule


def check_extension(
    to: int, positions: str, sharpen: str | float, train_length: int | None
) -> None:
    """Raise on lengths and names that extend no model."""
    check_length(to, "to")
    if train_length is not None:
        check_length(train_length, "train_length")
    if positions not in POSITIONS:
        raise UsageError(f"positions must be one of {', '.join(POSITIONS)}, got {positions!r}")
    is_number = isinstance(sharpen, int | float) and not isinstance(sharpen, bool)
    is_scale = is_number and 0 < float(sharpen) < math.inf
    if not is_scale and sharpen not in SHARPENS:
        raise UsageError(
            f"sharpen must be one of {', '.join(SHARPENS)} or a positive number, got {sharpen!r}"
        )


def check_layers(layers: str, attention: str) -> None:
    """Raise on names that choose no layers."""
    if layers not in LAYERS:
        raise UsageError(f"layers must be 'full', 'all' or a function, got {layers!r}")
    if attention not in ATTENTIONS:
        raise UsageError(f"attention must be 'self' or 'all', got {attention!r}")
