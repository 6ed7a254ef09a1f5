"""The options of a conversion, checked without torch."""

from typing import Literal, get_args

from ssmax.errors import UsageError
from ssmax.nn.rules import RULES
from ssmax.ops.length import check_length

Init = Literal["identity", "paper", "anneal"]
INITS: tuple[str, ...] = get_args(Init)
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


def check_layers(layers: str, attention: str) -> None:
    """Raise on names that choose no layers."""
    if layers not in LAYERS:
        raise UsageError(f"layers must be 'full', 'all' or a function, got {layers!r}")
    if attention not in ATTENTIONS:
        raise UsageError(f"attention must be 'self' or 'all', got {attention!r}")
