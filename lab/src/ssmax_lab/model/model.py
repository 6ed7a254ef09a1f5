"""Model language: embed, attend and feed forward a number of times, predict; save and load."""

# B batch, T new tokens, S keys, C hidden size, F feed-forward size, V vocabulary, H heads

import dataclasses
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ssmax._files import make_folder
from ssmax.distributed import SequenceShard
from ssmax.errors import MachineError, UsageError
from ssmax.nn import KVCache, ProbeTable, RMSNorm, RotaryEmbedding, SelfAttention
from ssmax.ops.visible import MaskSpec, mask_spec
from ssmax_lab.model.config import CONFIG, FORMAT, LMConfig
from ssmax_lab.model.loss import linear_cross_entropy

WEIGHTS = "model.safetensors"


def is_of_the_rule(name: str) -> bool:
    """Tell whether a parameter goes with the rule: what its layers learn, or the probe's table."""
    return ".ssmax." in name or name.startswith("table.")


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate: nn.Linear = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up: nn.Linear = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down: nn.Linear = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        return self.down(F.silu(self.gate(x_BTC)) * self.up(x_BTC))


class Block(nn.Module):
    """Attention and feed-forward, each on a normed copy of the residual stream."""

    def __init__(self, config: LMConfig, layer: int, table: ProbeTable | None) -> None:
        super().__init__()
        self.attention_norm: RMSNorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention: SelfAttention = SelfAttention(
            config.hidden_size,
            config.num_heads,
            num_kv_heads=config.kv_heads,
            head_dim=config.head,
            rule=config.rule,
            train_length=config.train_length,
            theta=config.theta,
            rotary_dim=config.rotary,
            qk_norm=config.qk_norm,
            window=config.window_of(layer),
            dropout_p=config.dropout_p,
            table=table,
        )
        self.ff_norm: RMSNorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.ff: SwiGLU = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self, x_BTC: Tensor, more_BTC: Tensor | None, **attention: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the residual stream and what has yet to be added to it, (B, T, C); return the same.

        Whoever adds norms the sum next, in one kernel of the compiler's: so the sum at the end of a
        block is left to the next. The keywords are those of SelfAttention.
        """
        x_BTC = x_BTC if more_BTC is None else x_BTC + more_BTC
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), **attention)
        return x_BTC, self.ff(self.ff_norm(x_BTC))


class LM(nn.Module):
    """`LM(config)(tokens)` gives logits (B, T, V); `generate` continues prompts."""

    residual_dtype: torch.dtype | None = None
    """Of the residual stream; None: as the embedding has it. Training in bfloat16 narrows it."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding: nn.Embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.table: ProbeTable | None = None
        if config.rule == "probe":
            self.table = ProbeTable(config.train_length)
        self.blocks: nn.ModuleList = nn.ModuleList(
            Block(config, layer, self.table) for layer in range(config.num_layers)
        )
        self.norm: RMSNorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head: nn.Linear = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary: RotaryEmbedding = RotaryEmbedding(config.rotary, config.theta)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights of std 0.02, smaller by sqrt(2 layers) where a block adds its output."""
        residual = 0.02 / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                adds = name.endswith(("o_proj", "ff.down"))
                gain = self.config.query_gain if name.endswith("q_proj") else 1.0
                nn.init.normal_(module.weight, std=residual if adds else 0.02 * gain)

    @property
    def theta(self) -> float:
        """Return the base of the rotary frequencies, which may be set at any time."""
        return self.rotary.theta

    @theta.setter
    def theta(self, theta: float) -> None:
        self.rotary.theta = theta

    @torch.no_grad()
    def with_rule(self, rule: str, *, train_length: int | None = None) -> "LM":
        """Copy under another rule: the same weights, the new rule's own at their start.

        `train_length` is the one that the rule starts from or is defined by; None: the model's.
        """
        length = self.config.train_length if train_length is None else train_length
        config = dataclasses.replace(self.config, rule=rule, train_length=length)
        # Its own weights are drawn for nothing; the caller's numbers stay where they are.
        with torch.random.fork_rng(devices=[]):
            copy = LM(config).to(self.embedding.weight.device)
        shared = dict(self.named_parameters())
        for name, parameter in copy.named_parameters():
            if name in shared and not is_of_the_rule(name):
                parameter.data = shared[name].clone()
        copy.theta, copy.residual_dtype = self.theta, self.residual_dtype
        return copy.train(self.training)

    @property
    def num_parameters(self) -> int:
        """Count the numbers that are learned."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        cache: KVCache | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Compute logits (B, T, V). A cache is written and advanced; masks cover its keys too."""
        hidden_BTC = self.hidden(
            tokens_BT, cache=cache, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens
        )
        return self.head(hidden_BTC)

    def hidden(
        self,
        tokens_BT: Tensor,
        *,
        cache: KVCache | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        shard: SequenceShard | None = None,
    ) -> Tensor:
        """Compute what the head reads, (B, T, C), for a loss that never makes the logits.

        `max_seqlen` promises that no packed document is longer, which is faster on a GPU. With a
        `shard` the tokens are this rank's of a sequence that is split over ranks.
        """
        self._check_tokens(tokens_BT)
        if shard is None:
            shared = self._shared(tokens_BT, cache, key_padding_mask, cu_seqlens, max_seqlen)
        else:
            shared = self._shared_of(shard)
        x_BTC, more_BTC = self._embedded(tokens_BT), None
        for layer, block in enumerate(self.blocks):
            own = shared[self.config.window_of(layer)]
            x_BTC, more_BTC = block(x_BTC, more_BTC, cache=cache, layer=layer, **own)
        if cache is not None:
            cache.advance(tokens_BT.shape[1])
        assert more_BTC is not None
        return self.norm(x_BTC + more_BTC)

    def _embedded(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT)
        return x_BTC if self.residual_dtype is None else x_BTC.to(self.residual_dtype)

    @torch.no_grad()
    def losses(self, tokens_BT: Tensor) -> Tensor:
        """Compute -log p of every token given those before it, (B, T - 1), without the logits."""
        hidden_BTC = self.hidden(tokens_BT[:, :-1])
        return linear_cross_entropy(
            hidden_BTC, self.head.weight, tokens_BT[:, 1:].long(), reduction="none"
        ).float()

    def attention_rows(
        self,
        tokens_BT: Tensor,
        rows: Sequence[int] | Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Yield the weights of chosen queries, (B, H, rows, S), one layer after the other.

        Memory grows with rows x tokens, never with tokens x tokens.
        """
        self._check_tokens(tokens_BT)
        shared = self._shared(tokens_BT, None, key_padding_mask, cu_seqlens)
        x_BTC, more_BTC = self._embedded(tokens_BT), None
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            own = shared[self.config.window_of(layer)]
            x_BTC = x_BTC if more_BTC is None else x_BTC + more_BTC
            yield block.attention.rows(block.attention_norm(x_BTC), rows, **own)
            x_BTC, more_BTC = block(x_BTC, None, **own)

    def generate(
        self,
        prompts: Sequence[Sequence[int]] | Tensor,
        max_new_tokens: int,
        **options: Any,
    ) -> list[list[int]]:
        """Continue every prompt; return the new tokens of each, up to and without its stop token.

        Options are those of `stream`. Prompts may differ in length; each comes out as it does
        alone.
        """
        new: list[list[int]] = [[] for _ in prompts]
        for tokens in self.stream(prompts, max_new_tokens, **options):
            for row, token in zip(new, tokens, strict=True):
                if token is not None:
                    row.append(token)
        return new

    def stream(
        self,
        prompts: Sequence[Sequence[int]] | Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_tokens: Sequence[int] = (),
        generator: torch.Generator | None = None,
    ) -> Iterator[list[int | None]]:
        """Yield each step's token for every prompt, None for one that has stopped.

        `temperature` 0 takes the likeliest token. `top_k` keeps the k likeliest, `top_p` the
        likeliest that together reach that probability.
        """
        # Here: training needs none of it.
        from ssmax_lab.model import generation

        choose = generation.chooser(temperature, top_k, top_p, generator)
        if max_new_tokens < 0:
            raise UsageError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
        weight = self.embedding.weight
        tokens_BT, keep_BT = generation.left_padded(prompts, self.config.vocab_size, weight.device)
        # A tensor's elements are told apart by what they are, not by what they hold.
        stop = frozenset(map(int, stop_tokens))
        return generation.decode(self, tokens_BT, keep_BT, max_new_tokens, choose, stop)

    def _shared(
        self,
        tokens_BT: Tensor,
        cache: KVCache | None,
        key_padding_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None = None,
    ) -> dict[int | None, dict[str, Any]]:
        """Compute what layers of one window need alike: the mask spec, n, and the rotary tables."""
        num_new = tokens_BT.shape[1]
        num_keys = num_new if cache is None else cache.length + num_new
        windows = map(self.config.window_of, range(self.config.num_layers))
        specs = {
            window: mask_spec(
                num_new,
                num_keys,
                is_causal=True,
                window=window,
                cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen,
                key_padding_mask=key_padding_mask,
                batch=tokens_BT.shape[0],
                device=tokens_BT.device,
            )
            for window in dict.fromkeys(windows)
        }
        # Positions do not depend on what is visible.
        rotary = self.rotary(_positions(next(iter(specs.values()))))
        return {
            window: {"mask_spec": mask_spec, "num_keys": mask_spec.num_visible(), "rotary": rotary}
            for window, mask_spec in specs.items()
        }

    def _shared_of(self, shard: SequenceShard) -> dict[int | None, dict[str, Any]]:
        """Compute the same for this rank's tokens of a split sequence."""
        rotary = self.rotary(shard.positions)
        windows = map(self.config.window_of, range(self.config.num_layers))
        return {
            window: {"shard": shard, "num_keys": shard.num_keys(window), "rotary": rotary}
            for window in dict.fromkeys(windows)
        }

    def _check_tokens(self, tokens_BT: Tensor) -> None:
        if tokens_BT.dim() != 2 or tokens_BT.is_floating_point() or tokens_BT.dtype == torch.bool:
            raise UsageError(
                "tokens must be integers of shape (batch, tokens), "
                f"got {tokens_BT.dtype} of shape {tuple(tokens_BT.shape)}"
            )


def _positions(mask_spec: MaskSpec) -> Tensor:
    """Locate every new token in its own document, padding not counted: (T,) or (B, T)."""
    index_T = mask_spec.index()
    if mask_spec.key_padding_mask is not None:
        return (mask_spec.key_padding_mask.cumsum(-1) - 1).clamp_min(0)[:, index_T]
    if mask_spec.cu_seqlens is not None:
        return index_T - mask_spec.documents()[0]
    return index_T


def save_lm(model: LM, folder: str | Path) -> None:
    """Write weights and configuration; the folder is made."""
    folder = Path(folder)
    make_folder(folder)
    weights = {name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}
    # Theta may have been changed on the model.
    config = dataclasses.replace(model.config, theta=model.theta)
    values = {"format": FORMAT, **config.to_dict()}
    # New weights do not meet an old configuration, nor half of them a new one.
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as own:
        try:
            safetensors.torch.save_file(weights, Path(own) / WEIGHTS)
        except SafetensorError as error:
            # A full disk, which safetensors tells as an error of its own.
            raise MachineError(f"{folder / WEIGHTS} was not saved: {error}") from error
        (Path(own) / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
        for name in (WEIGHTS, CONFIG):
            (Path(own) / name).replace(folder / name)


def load_lm(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> LM:
    """Load the model of a folder; what is missing, extra or of another shape is named."""
    folder = Path(folder)
    config = read_config(folder)
    if not (folder / WEIGHTS).is_file():
        raise UsageError(f"{folder} holds no {WEIGHTS}; is the checkpoint whole?")
    try:
        weights = safetensors.torch.load_file(folder / WEIGHTS)
    except Exception as error:
        raise UsageError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    model = lm_of_shapes(config)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        told = " ".join(str(error).split())
        raise UsageError(f"{folder / WEIGHTS} does not fit its {CONFIG}: {told}") from None
    return model.to(device=device, dtype=dtype)


class _WithoutFirstValues(TorchFunctionMode):
    """Skips torch.nn.init: random values on the meta device import all of torch.compile."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def lm_of_shapes(config: LMConfig) -> LM:
    """Build a model on the meta device, for weights that will be assigned."""
    with torch.device("meta"), _WithoutFirstValues():
        return LM(config)


def read_config(folder: Path) -> LMConfig:
    """Read the configuration of a folder."""
    path = folder / CONFIG
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    if not path.is_file():
        raise UsageError(f"{folder} is no model: it holds no {CONFIG}")
    try:
        values: Any = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise UsageError(f"{path} is not of format {FORMAT}: it is another model's")
    try:
        return LMConfig.from_dict(values)
    except (TypeError, UsageError) as error:
        raise UsageError(f"{path} is no model's configuration: {error}") from error
