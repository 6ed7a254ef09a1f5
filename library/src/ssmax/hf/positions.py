"""How many positions a model knows."""

from torch import nn


def learned_positions(model: nn.Module) -> int | None:
    """How many there are; None for rotations and biases, which do not end."""
    tables = [
        module.num_embeddings - _first_position(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and ("pos" in name or name.endswith("wpe"))
    ]
    return min(tables, default=None)


def _first_position(table: nn.Embedding) -> int:
    """Rows that no token comes to: OPT and BART keep an offset, RoBERTa counts from its padding."""
    return getattr(table, "offset", 0 if table.padding_idx is None else table.padding_idx + 1)
