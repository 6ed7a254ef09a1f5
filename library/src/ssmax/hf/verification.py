"""Check a converted model: every layer is reached, n is right, padding is not counted."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ssmax.errors import UsageError
from ssmax.hf.conversion import must_be_converted, unwrapped
from ssmax.hf.hook import watched
from ssmax.hf.layers import converted_modules, in_tower, module_device

TOKENS, PADDING = 12, 5
# What models of Transformers read.
_INPUTS = ("input_ids", "pixel_values", "input_features", "input_values", "decoder_input_ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What was verified."""

    layers: int
    """Attention layers that were reached and count right; text reaches no towers."""
    tokens: int
    padded: bool
    """A left-padded row was looked at too."""


class UnverifiedError(UsageError):
    """A model that does not run on tokens alone; whether it counts right is not known."""


@torch.no_grad()
def verify(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> Verified:
    """Run a few tokens through the model and compare n with the keys that its kernel weighs.

    All at once, behind padding, and one more behind a cache of the others, as far as the model has
    masks and a cache. Tokens do not reach towers that look at pictures or listen: `inputs` that do,
    without padding, are run instead. Raises a ValueError that names the layers that were not
    reached or count wrongly, or says that the model does not run on tokens.
    """
    record = must_be_converted(model)
    model = unwrapped(model)
    names = {module: name for name, module in converted_modules(model)}
    if gone := sorted(set(record.layers) ^ set(names.values())):
        raise UsageError(f"what was converted is not what carries an ssmax: {', '.join(gone[:3])}")
    was_training = model.training
    model.eval()
    padded = inputs is None and "attention_mask" in _parameters(model)
    try:
        shown = _inputs(model, 0) if inputs is None else inputs
        reached = _compare(model, names, shown, 0)
        if padded:
            _compare(model, names, _inputs(model, PADDING), PADDING)
        if inputs is None:
            _compare_decoding(model, names, shown)
    except Exception as error:
        if inputs is not None or isinstance(error, UsageError):
            raise
        raise UnverifiedError(_no_tokens(model, error)) from error
    finally:
        model.train(was_training)
    missed = sorted(set(names.values()) - reached)
    if inputs is None:
        missed = [name for name in missed if not in_tower(name)]
    if missed:
        raise UsageError(
            f"{len(missed)} of {len(names)} converted layers were not reached, such as "
            f"{missed[0]!r}: {'tokens alone do' if inputs is None else 'these inputs do'} not lead "
            "there (pass inputs= that do; cross attention waits for encoder_hidden_states), or its "
            "attention does not go through Transformers' interface; convert the model without "
            "them (attention='self', or layers=a function)"
        )
    tokens = shown["input_ids"].shape[-1] if "input_ids" in shown else 0
    return Verified(layers=len(reached), tokens=tokens, padded=padded)


def _parameters(model: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(model.forward).parameters


def _no_tokens(model: nn.Module, error: Exception) -> str:
    said = (str(error).strip().splitlines() or [""])[0]
    wanted = ", ".join(f"{name!r}: ..." for name in _INPUTS if name in _parameters(model))
    return (
        f"verify could not run this {type(model).__name__} on tokens of its own making "
        f"({type(error).__name__}: {said}); pass what its forward takes, as in "
        f"ssmax.hf.verify(model, inputs={{{wanted}}})"
    )


def _compare(
    model: nn.Module, names: dict[nn.Module, str], inputs: Mapping[str, Any], padding: int
) -> set[str]:
    """Find the layers that the inputs reach; raise where one counts wrongly behind the padding."""
    reached = set()
    behind = f" behind {padding} of padding" if padding else ""

    def audit(module: nn.Module, num_keys: Tensor, key_BGKD: Tensor, weighed_BHQ: Tensor) -> None:
        if module not in names:
            return
        reached.add(names[module])
        counts_BHQ = num_keys.unsqueeze(1) if num_keys.dim() == 2 else num_keys
        # What padding sees, if anything, does not matter.
        counts_BHQ = counts_BHQ.expand_as(weighed_BHQ)[..., padding:]
        wanted_BHQ = weighed_BHQ[..., padding:]
        if torch.equal(counts_BHQ, wanted_BHQ):
            return
        # Such a key is weighed as it happens, and takes the weight of others with it.
        if not bool(key_BGKD.isfinite().all()):
            raise UsageError(
                f"what {names[module]!r} reads is NaN or infinite{behind}, so that its n cannot be "
                "compared: look at the s and b of the layers before it, at the model's own "
                "weights, its dtype and its attention implementation ('sdpa' bears padding that "
                "'eager' may not)"
            )
        differ = (counts_BHQ != wanted_BHQ).any(-1).nonzero()[0].tolist()
        raise UsageError(
            f"{names[module]!r} counts n = {counts_BHQ[*differ].tolist()} where "
            f"{wanted_BHQ[*differ].tolist()} keys are visible{behind}"
        )

    with watched(audited(audit)):
        model(**inputs)
    return reached


def audited(audit: Callable[[nn.Module, Tensor, Tensor, Tensor], None]) -> Callable[..., None]:
    """Make a watcher that calls `audit` with a module, its n, its keys and how many are weighed.

    The kernel itself says how many keys get weight, (B, H, Q): values that are 1 in one place each
    make its output the weights of as many keys as they are wide.
    """

    def watch(module, num_keys, query, key, value, attend) -> None:
        weighed_BHQ = torch.zeros((), dtype=torch.long, device=query.device)
        for keys in torch.arange(key.shape[2], device=query.device).split(value.shape[-1]):
            one_hot = torch.zeros_like(value)
            one_hot[:, :, keys, keys - keys[0]] = 1
            weights_BQHD, *_ = attend(torch.zeros_like(query), one_hot)
            weighed_BHQ = weighed_BHQ + (weights_BQHD > 0).sum(-1).transpose(1, 2)
        audit(module, num_keys, key, weighed_BHQ)

    return watch


def _compare_decoding(
    model: nn.Module, names: dict[nn.Module, str], inputs: Mapping[str, Any]
) -> None:
    """Compare one more token behind a cache: decoding counts a single query in its own way."""
    if "use_cache" not in inputs:
        return
    cache = model(**{**inputs, "use_cache": True}).get("past_key_values")
    if cache is not None:
        new = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
        step = {new: inputs[new][:, -1:], "past_key_values": cache, "use_cache": True}
        _compare(model, names, {**inputs, **step}, 0)


def _inputs(model: nn.Module, padding: int) -> dict[str, Any]:
    config: Any = model.config
    text = config.get_text_config()
    device = module_device(model)
    tokens = torch.arange(TOKENS, device=device).remainder(max(2, text.vocab_size - 1)).view(1, -1)
    inputs: dict[str, Any] = {"input_ids": tokens + 1 if text.vocab_size > TOKENS + 1 else tokens}
    if padding:
        inputs["attention_mask"] = torch.ones_like(tokens)
        inputs["attention_mask"][:, :padding] = 0
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
        if padding:
            inputs["decoder_attention_mask"] = inputs["attention_mask"]
    if "use_cache" in _parameters(model):
        inputs["use_cache"] = False
    return inputs
