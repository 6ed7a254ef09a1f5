"""What a conversion can be asked for, checked without torch."""

from typing import Literal, get_args

from ssmax.errors import UsageError
from ssmax.nn.rules import RULES
from ssmax.ops.length import check_length

Init = Literal["identity", "paper", "anneal", "clamp"]
INITS: tuple[str, ...] = get_args(Init)
LAYERS, ATTENTIONS = ("full", "all"), ("self", "all")


def check_choice(
    rule: str, init: str, train_length: int | None, bias: bool | None
) -> tuple[str, int | None]:
    """The rule that the choice amounts to, and the length that it needs."""
    if init not in INITS:
        raise UsageError(f"init must be one of {', '.join(INITS)}, got {init!r}")
    if rule not in RULES:
        raise UsageError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    if train_length is not None:
        check_length(train_length, "train_length")
    needs_length = init in ("anneal", "clamp") or RULES[rule].needs_length
    if init == "identity" and rule in ("ssmax", "ssmax_bias"):
        needs_length = False
    if needs_length and train_length is None:
        raise UsageError(
            f"rule={rule!r} with init={init!r} needs train_length, the length that the model was "
            "trained at (not max_position_embeddings, which may be longer); for example "
            "train_length=4096"
        )
    if init == "clamp":
        if rule not in ("ssmax", "qwen_logn"):
            raise UsageError(f"init='clamp' is a rule of its own; it cannot go with rule={rule!r}")
        if bias is not None:
            raise UsageError(
                f"init='clamp' learns nothing, so bias={bias} has no place in it; leave it out"
            )
        return "qwen_logn", train_length
    if rule not in ("ssmax", "ssmax_bias"):
        if init == "anneal" or bias is not None:
            what = "init='anneal'" if init == "anneal" else f"bias={bias}"
            raise UsageError(f"{what} belongs to rule='ssmax', not to {rule!r}")
        if init == "identity" and not RULES[rule].starts_as_softmax:
            raise UsageError(
                f"rule={rule!r} does not start where softmax is; pass init='paper' for its own "
                "first values"
            )
        return rule, train_length
    if rule == "ssmax_bias" and bias is False:
        raise UsageError("rule='ssmax_bias' has a bias; for none pass rule='ssmax'")
    starts_with_one = rule == "ssmax_bias" or init in ("identity", "anneal")
    has_bias = starts_with_one if bias is None else bias
    if init in ("identity", "anneal") and not has_bias:
        raise UsageError(f"init={init!r} needs the bias: s = 0 without one would see nothing")
    return "ssmax_bias" if has_bias else "ssmax", train_length


def check_layers(layers: str, attention: str) -> None:
    """Refuse names that choose no layers."""
    if layers not in LAYERS:
        raise UsageError(f"layers must be 'full', 'all' or a function, got {layers!r}")
    if attention not in ATTENTIONS:
        raise UsageError(f"attention must be 'self' or 'all', got {attention!r}")
