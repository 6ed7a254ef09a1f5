"""n in every situation a model is called in, for every kernel: the logits are the explicit twin's.

SDPA, flash and flex run in float64 and must agree to float64's rounding; eager code takes its
softmax in float32 whatever it is given, so it runs in float32. How far a model with s = 0, b = 1
(softmax itself) is off in the same situation is the measure of how far any may be.
"""

import functools
from dataclasses import dataclass

import pytest
import torch
from explicit import CROSS, Explicit, both_ways, causal
from flash_stand_in import flash_attn, flash_attn_func  # noqa: F401 (a fixture)
from tiny_models import build, randomise, tokens_of
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask
from transformers import (
    AttentionInterface,
    DynamicCache,
    QuantizedCache,
    StaticCache,
    masking_utils,
)
from transformers.cache_utils import QuantizedLayer
from transformers.integrations import flex_attention as flex_integration

import ssmax.hf
from ssmax.hf import hook
from ssmax.hf.masks import count_keys
from ssmax.hf.verification import audited
from ssmax.ops.visible import Ramp

DECODERS = ("llama", "qwen3", "mistral", "gpt2", "gemma3_mixed")
KINDS = ("eager", "sdpa", "flash_attention_2", "flex_attention")
LENGTH = 12
# What flex says of itself when it is not compiled.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def kernels(monkeypatch, flash_attn):  # noqa: F811 (the fixture)
    """Flash attention in plain torch; flex as it is but not compiled, which on a CPU is wrong."""
    monkeypatch.setattr(
        flex_integration, "compile_friendly_flex_attention",
        lambda q, k, v, training=False, **options: flex.flex_attention(q, k, v, **options),
    )  # fmt: skip
    monkeypatch.setattr(
        masking_utils, "create_block_mask",
        lambda *args, _compile, **options: flex.create_block_mask(*args, **options),
    )  # fmt: skip


@dataclass(kw_only=True)
class Situation:
    run: object
    """The logits of a model, in whatever parts."""
    visible: object
    """What a layer's queries see, by its name and window."""
    inputs: dict
    """What the twin is given, at once."""
    real: torch.Tensor
    """Where the logits matter."""


def whole(model, **inputs):
    return model(use_cache=False, **inputs).logits


def in_parts(model, tokens, sizes, new_cache, mask=None, positions=None):
    cache, start, parts = new_cache(model.config), 0, []
    for size in sizes:
        end = start + size
        options = {"past_key_values": cache, "use_cache": True}
        if mask is not None:
            options["attention_mask"] = mask[:, :end]
        if positions is not None:
            options["position_ids"] = positions[:, start:end]
        parts.append(model(input_ids=tokens[:, start:end], **options).logits)
        start = end
    return torch.cat(parts, dim=1)


def dynamic_cache(config):
    return DynamicCache(config=config)


def static_cache(config):
    return StaticCache(config=config, max_cache_len=LENGTH + 5)


class Lossless(QuantizedLayer):
    """A quantised layer whose codes are the numbers themselves."""

    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, q_tensor):
        return q_tensor


def quantised_cache(config):
    cache = DynamicCache()
    cache.layers = [Lossless(residual_length=3) for _ in range(config.num_hidden_layers)]
    return cache


def of_mask(mask, *, positions=None, run=whole, **options):
    """A padded batch, or one without padding; the model is given the mask, the twin is not."""
    tokens = tokens_of(mask.shape[0], LENGTH)
    shared = {} if positions is None else {"position_ids": positions}
    if run is whole:
        options = {"input_ids": tokens, "attention_mask": mask, **shared}
    else:
        options = {"tokens": tokens, "mask": mask, "positions": positions, **options}
    return Situation(
        run=lambda model: run(model, **options),
        visible=lambda name, window: causal(mask, window=window),
        inputs={"input_ids": tokens, "use_cache": False, **shared},
        real=mask.bool(),
    )


def unpadded(run=whole, **options):
    tokens = tokens_of(2, LENGTH)
    real = torch.ones_like(tokens)
    given = {"input_ids": tokens} if run is whole else {"tokens": tokens, **options}
    return Situation(
        run=lambda model: run(model, **given),
        visible=lambda name, window: causal(real, window=window),
        inputs={"input_ids": tokens, "use_cache": False},
        real=real.bool(),
    )


def packed(bounds=(0, 5, 6, 12), *, by):
    rows = bounds[-1] // LENGTH
    tokens = tokens_of(rows, LENGTH)
    place = torch.arange(rows * LENGTH).view(rows, LENGTH)
    ends = torch.tensor(bounds, dtype=torch.int32)
    documents = torch.searchsorted(ends[1:].long(), place, right=True)
    positions = place - ends.long()[documents]
    inputs = {"input_ids": tokens, "position_ids": positions}
    options = {}
    if by == "cu_seq_lens":
        # Positions that go on, so that the bounds alone tell the documents.
        inputs["position_ids"] = place
        longest = int(ends.diff().max())
        options = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends,
                   "max_length_q": longest, "max_length_k": longest}  # fmt: skip
    real = torch.ones_like(tokens)
    return Situation(
        run=lambda model: whole(model, **inputs, **options),
        visible=lambda name, window: causal(real, documents, window),
        inputs={**inputs, "use_cache": False},
        real=real.bool(),
    )


def prefix(hidden_by, heads=(5,)):
    """The first five see each other; the mask is the caller's own, over every layer alike.

    With several heads, each has a prefix of another length.
    """
    tokens = tokens_of(2, LENGTH)
    place, lengths = torch.arange(LENGTH), torch.tensor(heads)
    seen_HQK = (place <= place[:, None]) | (place < lengths[:, None, None])
    seen = seen_HQK.expand(2, -1, -1, -1)

    def mask_of(model):
        if hidden_by is BlockMask:
            return flex.create_block_mask(
                lambda b, h, q, k: (k <= q) | (k < lengths[h % len(heads)]),
                2,
                len(heads),
                LENGTH,
                LENGTH,
                "cpu",
            )
        if hidden_by is bool:
            return seen
        low = torch.finfo(model.dtype).min if hidden_by == "finfo.min" else hidden_by
        return torch.zeros(seen.shape, dtype=model.dtype).masked_fill(~seen, low)

    return Situation(
        run=lambda model: whole(model, input_ids=tokens, attention_mask=mask_of(model)),
        visible=lambda name, window: seen,
        inputs={"input_ids": tokens, "use_cache": False},
        real=torch.ones_like(tokens).bool(),
    )


LEFT = torch.tensor([[1] * 12, [0] * 5 + [1] * 7, [0] * 2 + [1] * 10])
RIGHT = LEFT.flip(1)
FROM_MASK = (LEFT.cumsum(-1) - 1).clamp_min(0)
ONES = torch.ones(2, LENGTH, dtype=torch.long)
ONE_BY_ONE, CHUNKS = [1] * LENGTH, [5, 1, 6]

EVERYWHERE = {
    "prefill": unpadded,
    "one token at a time": lambda: unpadded(in_parts, sizes=ONE_BY_ONE, new_cache=dynamic_cache),
    "chunks": lambda: unpadded(in_parts, sizes=CHUNKS, new_cache=dynamic_cache),
    "static cache": lambda: of_mask(ONES, run=in_parts, sizes=[7, 1, 1, 3], new_cache=static_cache),
    "static cache, padded": lambda: of_mask(
        LEFT, run=in_parts, positions=FROM_MASK, sizes=[9, 1, 1, 1], new_cache=static_cache
    ),
    "quantised cache": lambda: unpadded(in_parts, sizes=[5, 1, 1, 5], new_cache=quantised_cache),
    "left padding": lambda: of_mask(LEFT),
    "left padding, positions": lambda: of_mask(LEFT, positions=FROM_MASK),
    "left padding, decoding": lambda: of_mask(
        LEFT, run=in_parts, positions=FROM_MASK, sizes=[8, 1, 1, 1, 1], new_cache=dynamic_cache
    ),
    "left padding, chunks": lambda: of_mask(
        LEFT, run=in_parts, positions=FROM_MASK, sizes=[6, 4, 2], new_cache=dynamic_cache
    ),
    "right padding": lambda: of_mask(RIGHT),
    "right padding, positions": lambda: of_mask(
        RIGHT, positions=torch.arange(LENGTH)[None].expand(3, -1)
    ),
    "packed by positions": lambda: packed(by="positions"),
}
MASKS = {
    f"prefix{'es' if len(heads) > 1 else ''}, hidden by {getattr(low, '__name__', low)}": (
        functools.partial(prefix, low, heads)
    )
    for low in (bool, "finfo.min", -1e9, -1e4, -torch.inf, BlockMask)
    for heads in ((5,), (2, 5, 7, 9))
}
FLASH_ONLY = {
    "packed by cu_seq_lens": lambda: packed(by="cu_seq_lens"),
    "two rows packed by cu_seq_lens": lambda: packed((0, 4, 12, 15, 24), by="cu_seq_lens"),
}
SITUATIONS = EVERYWHERE | MASKS | FLASH_ONLY


def suits(name, kind):
    if name in FLASH_ONLY:
        return kind == "flash_attention_2"
    if name == "static cache" and kind == "flex_attention":
        # Transformers moves the cache's length on before flex looks at the mask made with it:
        # softmax sees keys that are not written yet. The test below has this case.
        return False
    if name not in MASKS:
        return True
    # Eager code and flex add what they are given: a mask of booleans would hide nothing.
    by = {"BlockMask": ("flex_attention",), "bool": ("sdpa",)}
    # Of a tensor flex is given the first head's; the test below has this case too.
    one_head = () if name.startswith("prefixes") else ("flex_attention",)
    return kind in by.get(name.rsplit(" ", 1)[-1], ("eager", "sdpa", *one_head))


CASES = [(name, kind) for name in SITUATIONS for kind in KINDS if suits(name, kind)]


@functools.cache
def models(family, dtype):
    """One that is softmax and one whose s and b matter, each with its twin."""
    found = []
    for change in (lambda model: model, randomise):
        # T5 divides its logits by nothing: they are large as they are.
        model = build(family, boost=3.0 if family == "t5" else 30.0)
        # Cast afterwards, s and b are as wide as the rest, and so is the factor.
        model = change(ssmax.hf.convert(model, layers="all", attention="all")).to(dtype)
        found.append((model, Explicit(model)))
    return found


@torch.no_grad()
def error(model, twin, kind, situation):
    model.set_attn_implementation("eager")
    model.config._attn_implementation = kind
    wanted = twin.logits(situation.visible, **situation.inputs)
    return (situation.run(model).double() - wanted)[situation.real].abs().max().item()


def budget(family, kind, situation):
    """Sharper attention magnifies what rounding does; a wrong n is off by 1e-3 and more, below."""
    dtype = torch.float32 if kind == "eager" else torch.float64
    (plain, twin), _ = models(family, dtype)
    return 100 * max(error(plain, twin, kind, situation), 4 * torch.finfo(dtype).eps)


def check(family, kind, situation):
    _, (model, twin) = models(family, torch.float32 if kind == "eager" else torch.float64)
    allowed = budget(family, kind, situation)
    assert allowed < 1e-3, "softmax itself is not right in this situation"
    assert error(model, twin, kind, situation) <= allowed


def breadth(family, kind):
    """Flex is slow without a compiler: of decoders one, with and without windows, is looked at."""
    is_broad = kind == "flex_attention" and family != "gemma3_mixed"
    return pytest.mark.slow if is_broad else ()


@pytest.mark.parametrize(
    ("family", "name", "kind"),
    [
        pytest.param(family, name, kind, marks=breadth(family, kind))
        for family in DECODERS
        for name, kind in CASES
        # GPT-2 takes no BlockMask.
        if (family, "BlockMask") != ("gpt2", name[-9:])
    ],
)
def test_decoders_are_their_explicit_twins(family, name, kind):
    check(family, kind, SITUATIONS[name]())


@pytest.mark.parametrize("family", ["bert", "modernbert"])
@pytest.mark.parametrize("mask", [ONES, LEFT, RIGHT], ids=["whole", "left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_encoders_see_all_that_is_no_padding(family, mask, kind):
    tokens = tokens_of(mask.shape[0], LENGTH)
    situation = Situation(
        run=lambda model: model(input_ids=tokens, attention_mask=mask).logits,
        # A window of w is one of w - 1 to either side.
        visible=lambda name, window: both_ways(mask, LENGTH, window and window - 1),
        inputs={"input_ids": tokens},
        real=mask.bool(),
    )
    check(family, kind, situation)


@pytest.mark.parametrize("family", ["bart", "t5"])
@pytest.mark.parametrize(
    ("mask", "kind"),
    # Flash attention takes a padded encoder's mask for that of the decoder's queries.
    [*((ONES, kind) for kind in KINDS), *((RIGHT, kind) for kind in KINDS if "flash" not in kind)],
)
def test_cross_attention_counts_the_encoder_it_looks_at(family, mask, kind):
    rows, asked = mask.shape[0], 7
    if family == "t5" and "flash" in kind:
        pytest.skip("T5's position bias has no place in flash attention")
    tokens, answers = tokens_of(rows, LENGTH), tokens_of(rows, asked, seed=1)
    inputs = {"input_ids": tokens, "decoder_input_ids": answers, "use_cache": False}

    def visible(name, window):
        if CROSS.search(name):
            return both_ways(mask, asked)
        return both_ways(mask, LENGTH) if "encoder." in name else causal(torch.ones(rows, asked))

    situation = Situation(
        run=lambda model: model(attention_mask=mask, **inputs).logits,
        visible=visible,
        inputs=inputs,
        real=torch.ones(rows, asked, dtype=torch.bool),
    )
    check(family, kind, situation)


def engine(module, query, key, value, attention_mask, scaling, sliding_window=None, **_):
    """An engine's function: it is given no mask, and masks by what it knows."""
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return flash_attn_func(q, k, v, softmax_scale=scaling, causal=True, window_size=window), None


@pytest.mark.parametrize("family", DECODERS)
def test_engines_are_told_n_by_positions(monkeypatch, family):
    monkeypatch.setitem(AttentionInterface._global_mapping, "vllm", engine)
    check(family, "vllm", unpadded())


def counted(kind, queries=6, keys=6, **options):
    module = torch.nn.Module()
    module.is_causal = True
    q, k = torch.zeros(1, 1, queries, 2), torch.zeros(1, 1, keys, 2)
    return count_keys(kind, module, q, k, None, options).flatten().tolist()


def test_bounds_that_flash_attention_does_not_heed_are_not_counted():
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    options = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    assert counted("flash", **options) == [1, 2, 3, 4, 5, 6]
    assert counted("flash", **options, max_length_q=4, max_length_k=4) == [1, 2, 1, 2, 3, 4]


@pytest.mark.parametrize("first", ["full_attention", "sliding_attention"])
def test_layers_of_both_kinds_count_in_one_batch_whichever_comes_first(first):
    """Two rows being decoded, 9 and 4 tokens long, in a model with windows of 3."""
    bounds = {"full_attention": [0, 9, 13], "sliding_attention": [0, 3, 6]}
    bounds = {name: torch.tensor(bounds[name]) for name in sorted(bounds, key=lambda x: x != first)}
    options = {"cu_seq_lens_q": torch.tensor([0, 1, 2]), "cu_seq_lens_k": bounds,
               "max_length_q": 1, "max_length_k": {}}  # fmt: skip
    assert counted("flash", 2, 2, **options) == [9, 4]
    assert counted("flash", 2, 2, **options, sliding_window=3) == [3, 3]


def test_a_query_of_sdpa_never_sees_more_keys_than_there_are():
    assert counted("sdpa", queries=5, keys=3) == [1, 2, 3, 3, 3]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 7), (5, 5), (5, 7), (5, 3)])
@pytest.mark.parametrize("kind", ["eager", "sdpa", "flash"])
def test_what_is_known_without_looking_is_what_is_counted(kind, queries, keys, causal):
    module = torch.nn.Module()
    module.is_causal = causal
    q, k = torch.empty(2, 4, queries, 8), torch.empty(2, 4, keys, 8)
    wanted = count_keys(kind, module, q, k, None, {}).flatten()
    known = count_keys(kind, module, q, k, None, {}, as_ramp=True)
    if isinstance(known, Ramp):
        assert torch.equal(wanted, known.counts(queries))
    else:
        assert queries > keys and causal and kind != "eager"


SHORTCUTS = {
    "all keys": lambda kind, module, query, key, mask, options, **_: torch.full(
        (query.shape[2],), key.shape[2]
    ),
    "place among the keys": lambda kind, module, query, key, mask, options, **_: (
        torch.arange(key.shape[2] - query.shape[2], key.shape[2]) + 1
    ),
    "position + 1": lambda kind, module, query, key, mask, options, **_: (
        options["position_ids"] + 1
    ),
}


@pytest.mark.parametrize(
    ("shortcut", "situations"),
    [
        ("all keys", ["prefill", "static cache", "left padding", "chunks", "packed by positions"]),
        ("place among the keys", ["static cache", "left padding", "packed by positions"]),
        ("position + 1", ["left padding", "prefix, hidden by -10000.0"]),
    ],
)
def test_these_situations_tell_a_wrong_n(monkeypatch, shortcut, situations):
    """What looks like n and is not: off by far more than the tests above allow."""
    monkeypatch.setattr(hook, "count_keys", SHORTCUTS[shortcut])
    _, (model, twin) = models("llama", torch.float64)
    for name in situations:
        assert error(model, twin, "sdpa", SITUATIONS[name]()) > 1e-3, name


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "name", "kind"),
    [
        pytest.param(family, name, kind, marks=breadth(family, kind))
        for family in DECODERS
        for name, kind in [
            *(("static cache", kind) for kind in KINDS),
            ("prefixes, hidden by -10000.0", "flex_attention"),
        ]
    ],
)
def test_n_is_what_the_kernel_weighs_even_where_it_should_not(family, name, kind):
    """See `suits` for flex."""
    _, (model, _) = models(family, torch.float32 if kind == "eager" else torch.float64)
    model.config._attn_implementation = kind
    compared = []

    def audit(module, num_keys, key, weighed_BHQ):
        n_BHQ = num_keys.unsqueeze(1) if num_keys.dim() == 2 else num_keys
        compared.append(torch.equal(n_BHQ.expand_as(weighed_BHQ), weighed_BHQ))

    with hook.watched(audited(audit)):
        SITUATIONS[name]().run(model)
    assert len(compared) in (2, 8) and all(compared)


@torch.no_grad()
def test_a_cache_of_eight_bits_changes_the_keys_but_not_their_number():
    _, (model, _) = models("llama", torch.float64)
    model.config._attn_implementation = "sdpa"
    counts = []
    with hook.watched(lambda module, n, *_: counts.append(n.flatten().tolist())):
        in_parts(
            model, tokens_of(2, LENGTH), [9, 1, 2], lambda config: QuantizedCache("fp8", config)
        )
    assert counts == [[*range(1, 10)]] * 2 + [[10]] * 2 + [[11, 12] * 2] * 2
