"""Generate one token after the other: plainly, or on a GPU by replaying a CUDA graph.

A step of a small model is some two hundred kernels of a few microseconds: asked for one by one, the
asking takes ten times as long. So the step is written over memory that stays where it is, with all
that changes from token to token (bounds, position, slot) kept on the device.
"""

# B batch, T tokens, V vocabulary, C hidden size, G key heads, D head size

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ssmax.errors import UsageError
from ssmax.nn import KVCache, SelfAttention
from ssmax.ops.dtypes import autocast_dtype
from ssmax.ops.implementation import choose_impl
from ssmax_lab.model.config import check_sampling
from ssmax_lab.model.decode import decode_attention

if TYPE_CHECKING:
    from ssmax_lab.model.model import LM, Block

WARM_UPS = 2
WORTH_RECORDING = 64
"""New tokens from which on `auto` records: that takes as long as two or three plain steps, but the
first time in a process seconds, to compile."""
COLDEST = 1e-20
"""Below it logits divided by the temperature overflow; long before, the largest takes all."""


def chooser(
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Callable[[Tensor], Tensor]:
    """Make the function that chooses tokens (B,) from logits (B, V)."""
    check_sampling(temperature, top_k, top_p)

    def greedy(logits_BV: Tensor) -> Tensor:
        return logits_BV.argmax(-1)

    def sample(logits_BV: Tensor) -> Tensor:
        logits_BV = keep_likeliest(logits_BV / temperature, top_k, top_p)
        return torch.multinomial(logits_BV.softmax(-1), 1, generator=generator).squeeze(-1)

    return sample if temperature > COLDEST else greedy


def keep_likeliest(logits_BV: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Set to -inf all but the k likeliest, and all beyond the likeliest that reach p."""
    if top_k is not None and top_k < logits_BV.shape[-1]:
        least_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    if top_p is not None and top_p < 1.0:
        ordered_BV, order_BV = logits_BV.sort(-1, descending=True)
        weights_BV = ordered_BV.softmax(-1)
        # A token goes if those before it reach p already; the first always stays.
        beyond_BV = weights_BV.cumsum(-1) - weights_BV >= top_p
        logits_BV = logits_BV.masked_fill(
            torch.zeros_like(beyond_BV).scatter(-1, order_BV, beyond_BV), -torch.inf
        )
    return logits_BV


def left_padded(
    prompts: Sequence[Sequence[int]] | Tensor, vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Pad prompts to one batch (B, T); give where it holds tokens (B, T)."""
    rows = [torch.as_tensor(prompt) for prompt in prompts]
    if not rows:
        raise UsageError("prompts must hold at least one prompt, got none")
    for number, row in enumerate(rows):
        if row.dim() != 1 or row.numel() == 0:
            came = f"has shape {tuple(row.shape)}" if row.numel() else "is empty"
            raise UsageError(
                f"every prompt must be a list of at least one token; prompt {number} {came}"
            )
        if row.is_floating_point() or row.dtype == torch.bool:
            raise UsageError(f"tokens must be integers; prompt {number} holds {row.dtype}")
        # Tokens on disk are uint16, of which torch knows no least.
        row = rows[number] = row.long()
        if not (int(row.min()) >= 0 and int(row.max()) < vocab_size):
            raise UsageError(
                f"tokens must lie in 0..{vocab_size - 1}; prompt {number} holds "
                f"{int(row.min())}..{int(row.max())}. Is it another tokenizer's?"
            )
    longest = max(row.numel() for row in rows)
    tokens_BT = torch.stack([torch.nn.functional.pad(r, (longest - r.numel(), 0)) for r in rows])
    pads_B1 = torch.tensor([[longest - row.numel()] for row in rows])
    keep_BT = torch.arange(longest) >= pads_B1
    return tokens_BT.to(device), keep_BT.to(device)


def cache_dtype(weight: Tensor) -> torch.dtype:
    """Return what projections give: the weights' dtype, or autocast's."""
    return autocast_dtype(weight.device, weight.dtype) or weight.dtype


@dataclass(frozen=True)
class Weights:
    """A block's, as a step wants them: as narrow as products, joined where they meet one x."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    ff_norm: Tensor
    gate_and_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, block: "Block", dtype: torch.dtype) -> "Weights":
        """Copy the weights; the block is left as it is."""
        attention, ff = block.attention, block.ff
        qkv = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        return cls(
            attention_norm=block.attention_norm.weight.to(dtype),
            qkv=torch.cat(qkv).to(dtype),
            out=attention.o_proj.weight.to(dtype),
            ff_norm=block.ff_norm.weight.to(dtype),
            gate_and_up=torch.cat((ff.gate.weight, ff.up.weight)).to(dtype),
            down=ff.down.weight.to(dtype),
        )


class PlainDecoder:
    """`start` reads the prompts, `step` takes everybody's next token; both give logits (B, V).

    Rows are padded on the left.
    """

    def __init__(self, model: "LM", *, batch: int, max_keys: int) -> None:
        config, weight = model.config, model.embedding.weight
        self.model: LM = model
        self.cache: KVCache = KVCache.preallocated(
            config.num_layers,
            batch=batch,
            num_kv_heads=config.kv_heads,
            max_keys=max_keys,
            head_dim=config.head,
            dtype=cache_dtype(weight),
            device=weight.device,
        )

    @torch.no_grad()
    def start(self, tokens_BT: Tensor, keep_BT: Tensor) -> Tensor:
        """Read the prompts; keep_BT is False on their padding."""
        self.keep_BT = None if bool(keep_BT.all()) else keep_BT
        return self._after(tokens_BT)

    @torch.no_grad()
    def step(self, tokens_B: Tensor) -> Tensor:
        """Add a token to every row."""
        if self.keep_BT is not None:
            self.keep_BT = F.pad(self.keep_BT, (0, 1), value=True)
        return self._after(tokens_B.unsqueeze(-1))

    def _after(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTC = self.model.hidden(tokens_BT, cache=self.cache, key_padding_mask=self.keep_BT)
        return self.model.head(hidden_BTC[:, -1])


class CudaGraphDecoder(PlainDecoder):
    """Replay each step as one CUDA graph; `uses_graph` False computes it kernel by kernel.

    Logits are overwritten by the next step. It has a forward pass of its own because a token takes
    0.55 ms so, where Transformers' Llama of that size takes 1.74 ms with torch.compile and a static
    cache (one H200, docs/speed.md).
    """

    @torch.no_grad()
    def __init__(self, model: "LM", *, batch: int, max_keys: int, uses_graph: bool = True) -> None:
        super().__init__(model, batch=batch, max_keys=max_keys)
        weight = model.embedding.weight
        dtype = cache_dtype(weight)
        self.uses_graph: bool = uses_graph
        blocks = cast("Iterable[Block]", model.blocks)
        self.weights: list[Weights] = [Weights.of(block, dtype) for block in blocks]
        self.norm: Tensor = model.norm.weight.to(dtype)
        # Rows of zeros: with GPT-2's 50,257 the product took five times what its bytes take.
        missing = -model.head.weight.shape[0] % 128
        self.head: Tensor = F.pad(model.head.weight.to(dtype), (0, 0, 0, missing))
        zeros_B = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        self.tokens_B: Tensor = zeros_B.clone()
        self.start_B: Tensor = zeros_B.clone()
        self.stop_B: Tensor = zeros_B.clone()
        self.slot: Tensor = zeros_B[:1].clone()
        self.logits_BV: Tensor = torch.empty(0)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def start(self, tokens_BT: Tensor, keep_BT: Tensor) -> Tensor:
        """Read the prompts, and note the bounds of every row."""
        self.start_B.copy_(tokens_BT.shape[1] - keep_BT.sum(-1))
        self.stop_B.fill_(tokens_BT.shape[1])
        self.slot.fill_(tokens_BT.shape[1])
        return super().start(tokens_BT, keep_BT)

    @torch.no_grad()
    def step(self, tokens_B: Tensor) -> Tensor:
        """Add a token to every row."""
        if self.cache.length == self.cache.max_keys:
            raise UsageError(f"the cache is full: it holds {self.cache.max_keys} keys")
        self.tokens_B.copy_(tokens_B)
        if self.uses_graph and self._graph is None:
            self._record()
        if self._graph is not None:
            self._graph.replay()
        else:
            self.logits_BV = self._next()
        self.stop_B.add_(1)
        self.slot.add_(1)
        self.cache.length += 1
        return self.logits_BV

    def _record(self) -> None:
        """Record a step; what it writes the first replay writes again."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.slot.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    self._next()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self.logits_BV = self._next()
        self._graph = graph

    def _next(self) -> Tensor:
        # Everything has the dtype that autocast would give it; its casts need not be in the graph.
        with torch.autocast(self.slot.device.type, enabled=False):
            return self._logits()

    def _logits(self) -> Tensor:
        config = self.model.config
        fused = _compiled_glue() if self.uses_graph else _PLAIN_GLUE
        stop_B = self.stop_B + 1
        tables = self.model.rotary((stop_B - 1 - self.start_B).unsqueeze(-1))
        x_B1C = F.embedding(self.tokens_B, self.model.embedding.weight).unsqueeze(1)
        x_B1C = x_B1C.to(self.norm.dtype)
        h_B1C = _normed(x_B1C, self.weights[0].attention_norm, config.norm_eps)
        # For every window there is: where it starts, and n.
        seen: dict[int | None, tuple[Tensor, Tensor]] = {}
        for window in {config.window_of(layer) for layer in range(config.num_layers)}:
            start_B = self.start_B
            if window is not None:
                start_B = torch.maximum(start_B, stop_B - window)
            seen[window] = start_B, (stop_B - start_B).unsqueeze(-1)
        norms = [weights.attention_norm for weights in self.weights[1:]] + [self.norm]
        for layer, (block, weights) in enumerate(zip(self.model.blocks, self.weights, strict=True)):
            attention = cast(SelfAttention, block.attention)
            start_B, num_keys_B1 = seen[config.window_of(layer)]
            q, k, v = attention.joined_heads(F.linear(h_B1C, weights.qkv), num_keys_B1, *tables)
            keys, values = self.cache.room(layer)
            fused.write(keys, values, self.slot, k, v)
            out = decode_attention(q, keys, values, start_B, stop_B)
            y_B1C = F.linear(out.transpose(1, 2).flatten(-2), weights.out)
            x_B1C, h_B1C = fused.added(x_B1C, y_B1C, weights.ff_norm, config.norm_eps)
            y_B1C = F.linear(fused.gated(F.linear(h_B1C, weights.gate_and_up)), weights.down)
            x_B1C, h_B1C = fused.added(x_B1C, y_B1C, norms[layer], config.norm_eps)
        return F.linear(h_B1C, self.head)[:, 0, : self.model.head.out_features]


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _added(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add to the residual stream, and norm it."""
    x = x + y
    return x, _normed(x, weight, eps)


def _gated(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _write(keys: Tensor, values: Tensor, slot: Tensor, k: Tensor, v: Tensor) -> None:
    keys.index_copy_(2, slot, k)
    values.index_copy_(2, slot, v)


class _Glue(NamedTuple):
    """What lies between a step's products and attention."""

    added: Callable[..., tuple[Tensor, Tensor]]
    gated: Callable[[Tensor], Tensor]
    write: Callable[..., None]


_PLAIN_GLUE = _Glue(_added, _gated, _write)


@functools.cache
def _compiled_glue() -> _Glue:
    """Compile each to one kernel: of a captured step, half would be such small ones."""
    added, gated, write = _PLAIN_GLUE
    return _Glue(torch.compile(added), torch.compile(gated), torch.compile(write))


def decoder_kind(name: str, weight: Tensor, max_new_tokens: int) -> type[PlainDecoder]:
    """Choose by name, a promise; `auto` records where that is quicker for so many tokens."""
    names = ("auto", "plain", "cuda_graph")
    if name not in names:
        raise UsageError(f"decoder must be one of {', '.join(names)}, got {name!r}")
    if name == "cuda_graph" and weight.device.type != "cuda":
        device = weight.device
        raise UsageError(f"decoder='cuda_graph' needs CUDA, got {device}; pass decoder='plain'")
    if name == "auto":
        # The kernels have no float64.
        has_kernels = choose_impl("auto", weight.device) == "triton"
        is_wide = weight.dtype == torch.float64
        is_worth_it = max_new_tokens >= WORTH_RECORDING
        name = "cuda_graph" if has_kernels and not is_wide and is_worth_it else "plain"
    return CudaGraphDecoder if name == "cuda_graph" else PlainDecoder


def decode(
    model: "LM",
    kind: type[PlainDecoder],
    tokens_BT: Tensor,
    keep_BT: Tensor,
    max_new_tokens: int,
    choose: Callable[[Tensor], Tensor],
    stop_tokens: frozenset[int],
) -> Iterator[list[int | None]]:
    """Yield each step's token for every prompt, None for one that has stopped."""
    if not max_new_tokens:
        return
    batch, longest = tokens_BT.shape
    decoder = kind(model, batch=batch, max_keys=longest + max_new_tokens)
    running = [True] * batch
    logits_BV = decoder.start(tokens_BT, keep_BT)
    for left in reversed(range(max_new_tokens)):
        chosen_B = choose(logits_BV.float())
        step: list[int | None] = []
        for row, token in enumerate(chosen_B.tolist()):
            running[row] = running[row] and token not in stop_tokens
            step.append(token if running[row] else None)
        if not any(running):
            return
        yield step
        if left:
            logits_BV = decoder.step(chosen_B)
