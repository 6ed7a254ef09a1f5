"""One of several ranks: what split attention, right and wrong, gives, into a folder."""

import functools
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import ssmax.distributed
from ssmax import ssmax_factor
from ssmax.distributed import SequenceShard, context_parallel_attention
from ssmax.errors import UsageError
from ssmax.nn import SelfAttention
from ssmax.testing import check_attention, naive_attention, split_cases

DRAWN = 40


def with_count(count, q, k, v, s, *, bias=None, window=None, **split):
    """Attend to the right keys, with an n of the caller's: (tokens,)."""
    shard = SequenceShard(split["positions"], documents=split.get("documents"))
    n = count(shard, **split)
    n = n if window is None else n.clamp_max(window)
    b = None if bias is None else bias[:, None]
    factor = ssmax_factor(n, s[:, None], b)
    return shard.attention(q * factor[..., None], k, v, 0.0, bias=1.0, window=window)


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def local_n(shard, *, positions, documents=None):
    return torch.arange(1, len(positions) + 1)


def unpermuted_n(shard, *, positions, documents=None):
    return local_n(shard, positions=positions) + shard.rank * len(positions)


def restart_ignored(shard, *, positions, documents=None):
    if documents is None:
        return unpermuted_n(shard, positions=positions)
    everyone = gathered(documents * 10_000 + positions)
    return (everyone[None] <= (documents * 10_000 + positions)[:, None]).sum(-1)


MISTAKES = {f.__name__: functools.partial(with_count, f) for f in (
    local_n, unpermuted_n, restart_ignored
)}  # fmt: skip


def drawn(seed, size):
    """Any split of any sequence: shares, whole inputs, and options of the whole and of a share."""
    rng = random.Random(seed)
    length = rng.randint(size, 7 * size)
    order = list(range(length))
    if rng.random() < 0.6:
        rng.shuffle(order)
    cuts = sorted(rng.sample(range(1, length), size - 1))
    if rng.random() < 0.5:
        length -= length % size
        order = [token for token in order if token < length]
        cuts = [length // size * rank for rank in range(1, size)]
    shares = torch.tensor(order).tensor_split(cuts)
    batch, kv_heads, group = rng.randint(1, 2), rng.randint(1, 2), rng.choice([1, 3])
    heads = kv_heads * group
    torch.manual_seed(seed)
    draw = functools.partial(torch.randn, dtype=torch.float64)
    q = 3 * draw(batch, heads, length, 8)
    k, v = draw(batch, kv_heads, length, 8), draw(batch, kv_heads, length, rng.choice([8, 8, 4]))
    s, bias = 0.2 + torch.rand(heads).double(), draw(heads) if rng.random() < 0.4 else None
    by_row = rng.random() < 0.3
    rows = []
    for _ in range(batch if by_row else 1):
        starts = [token == 0 or rng.random() < 0.2 for token in range(length)]
        rows.append(torch.tensor(starts).cumsum(0))
    documents = torch.stack(rows)
    index = torch.arange(length)
    start = (
        torch.where(
            torch.nn.functional.pad(documents.diff(dim=-1), (1, 0), value=1).bool(), index, 0
        )
        .cummax(-1)
        .values
    )
    positions = index - start
    window = rng.choice([None, None, 1, 4])
    if not by_row and rng.random() < 0.5:
        documents, positions = documents[0], positions[0]
    return shares, (q, k, v, s, bias), positions, documents, window


def gradients_of_drawn(rank, size):
    """Errors of values and gradients against explicit logits in one process."""
    errors = []
    for seed in range(DRAWN):
        shares, inputs, positions, documents, window = drawn(seed, size)
        # Every other one as if it were cut up too far for causal kernels.
        ssmax.distributed.MOST_RUNS = 0 if seed % 2 else 16
        torch.manual_seed(seed)
        *_, s, bias = inputs
        q, k, v = inputs[:3]
        weight = torch.randn(*q.shape[:3], v.shape[3], dtype=torch.float64)
        learned = [x for x in inputs if x is not None]
        for x in learned:
            x.requires_grad_()
        options = {"window": window, "enable_gqa": True}
        exact = naive_attention(
            q, k, v, s, bias=bias, positions=positions, is_causal=True, **options
        )
        wanted = torch.autograd.grad((exact * weight).sum(), learned)
        mine = shares[rank]
        local = [x.detach()[:, :, mine].requires_grad_() for x in (q, k, v)]
        scalars = [x.detach().requires_grad_() for x in learned[3:]]
        out = context_parallel_attention(
            *local, scalars[0], bias=scalars[1] if bias is not None else None, window=window,
            positions=positions[..., mine], documents=documents[..., mine],
        )  # fmt: skip
        found = torch.autograd.grad((out * weight[:, :, mine]).sum(), [*local, *scalars])
        for gradient in found[3:]:
            dist.all_reduce(gradient)
        expected = [x[:, :, mine] for x in wanted[:3]] + list(wanted[3:])
        pairs = [(out, exact[:, :, mine]), *zip(found, expected, strict=True)]
        errors.append(max((a - b).abs().max().item() for a, b in pairs))
    ssmax.distributed.MOST_RUNS = 16
    return errors


def layers(rank, size):
    """Errors of SelfAttention's output and gradients under every rule, split against whole."""
    found = {}
    mine = ssmax.distributed.zigzag(24, size, rank)
    for rule in ("ssmax", "ssmax_bias", "softmax", "clamp", "probe"):
        for window in (None, 5):
            torch.manual_seed(0)
            layer = SelfAttention(
                16, 4, num_kv_heads=2, rule=rule, train_length=24, window=window, qk_norm=True
            ).double()
            x = torch.randn(2, 24, 16, dtype=torch.float64)
            weight = torch.randn_like(x)
            parameters = list(layer.parameters())
            exact = layer(x)
            wanted = torch.autograd.grad((exact * weight).sum(), parameters)
            shard = SequenceShard(mine)
            out = layer(x[:, mine], shard=shard)
            grads = torch.autograd.grad((out * weight[:, mine]).sum(), parameters)
            for grad in grads:
                dist.all_reduce(grad)
            pairs = [(out, exact[:, mine]), *zip(grads, wanted, strict=True)]
            found[rule, window] = max((a - b).abs().max().item() for a, b in pairs)
    return found


def bad(rank):
    """What each rank says of shares that do not fit together."""
    backwards, rows = torch.tensor([2, 0]), torch.zeros(2 if rank else 1, 3, dtype=torch.int64)
    shares = {
        "out of order": (backwards, None),
        "held twice": (backwards, torch.zeros(2, dtype=torch.int64)),
        "other rows": (rows, None),
    }
    said = {}
    for name, (positions, documents) in shares.items():
        try:
            SequenceShard(positions, documents=documents)
        except UsageError as error:
            said[name] = str(error)
    return said


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    cases = split_cases(rank, size)
    found = {
        "cases": check_attention(context_parallel_attention, cases),
        "drawn": gradients_of_drawn(rank, size),
        "layers": layers(rank, size),
        "bad": bad(rank),
        **{name: check_attention(wrong, cases) for name, wrong in MISTAKES.items()},
    }
    torch.save(found, Path(sys.argv[1]) / f"{rank}.pt")
    dist.destroy_process_group()
