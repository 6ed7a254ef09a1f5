"""Keys and values of rows side by side, with room behind them: a token more copies no cache."""

# B rows, G key heads, S tokens so far, T new tokens, D head width

from collections.abc import Sequence

import torch
from torch import Tensor


class Past:
    """Keys and values of every layer in turn, (B, G, room, D), of which the first `length` count.

    Rows end in the same column: what a shorter one lacks on the left is padding, and zero.
    """

    def __init__(self, tensors: Sequence[Tensor], length: int = 0) -> None:
        self.tensors: list[Tensor] = list(tensors)
        self.length: int = length

    @property
    def room(self) -> int:
        """How many tokens fit."""
        return self.tensors[0].shape[2]

    def views(self) -> list[Tensor]:
        """What counts of every tensor."""
        return [tensor[:, :, : self.length] for tensor in self.tensors]

    def make_room(self, num_tokens: int) -> None:
        """For so many more; now and then all is copied to where a quarter more fits."""
        needed = self.length + num_tokens
        if needed > self.room:
            room = needed + needed // 4 + 16
            self.tensors = [_moved([view], room, view.shape[2]) for view in self.views()]

    def write(self, index: int, new_BGTD: Tensor) -> Tensor:
        """Put new keys or values behind those that count; all of them, new ones included."""
        stop = self.length + new_BGTD.shape[2]
        self.tensors[index][:, :, self.length : stop] = new_BGTD
        return self.tensors[index][:, :, :stop]

    def joined(self, other: "Past") -> "Past":
        """Both, one below the other."""
        length = max(self.length, other.length)
        room = length + length // 4 + 16
        both = zip(self.views(), other.views(), strict=True)
        return Past([_moved(pair, room, length) for pair in both], length)

    def kept(self, rows: list[int], first: int) -> "Past":
        """These rows, from the first column on."""
        return Past([view[rows, :, first:] for view in self.views()], self.length - first)


def _moved(parts: Sequence[Tensor], room: int, length: int) -> Tensor:
    """Rows of all parts, each ending in column `length` of what has room for more."""
    _, heads, _, width = parts[0].shape
    moved = parts[0].new_zeros(sum(map(len, parts)), heads, room, width)
    for rows, part in zip(torch.split(moved, [len(part) for part in parts]), parts, strict=True):
        rows[:, :, length - part.shape[2] : length] = part
    return moved
