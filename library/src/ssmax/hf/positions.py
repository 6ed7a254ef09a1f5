"""The number of positions that a model has learned."""

from torch import nn


def learned_positions(model: nn.Module) -> int | None:
    """Count the positions that a model has learned; None for rotations and biases."""
    tables = [
        module.num_embeddings - _first_position(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and ("pos" in name or name.endswith("wpe"))
    ]
    return min(tables, default=None)


def _first_position(table: nn.Embedding) -> int:
    """Count the rows that no token comes to: the offset of OPT and BART, the padding of RoBERTa."""
    return getattr(table, "offset", 0 if table.padding_idx is None else table.padding_idx + 1)
