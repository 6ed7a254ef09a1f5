"""SelfAttention and KVCache: any split gives the same, and the factor is where it belongs."""

import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ssmax import apply_rope, rope_tables, visible_keys
from ssmax.nn import RULES, KVCache, ProbeTable, RotaryEmbedding, SelfAttention
from ssmax.ops.visible import mask_spec
from ssmax.testing import assert_no_worse_than, oracle_attention


def make(**options) -> SelfAttention:
    torch.manual_seed(0)
    options = {"num_kv_heads": 2, "train_length": 16, **options}
    layer = SelfAttention(32, 4, **options).double()
    if "s" in dict(layer.ssmax.named_parameters()):
        torch.nn.init.uniform_(layer.ssmax.s, 0.2, 1.0)
    return layer


def x(tokens=11, batch=2):
    return torch.randn(
        batch, tokens, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def caches():
    yield "growing", KVCache(1)
    yield "preallocated", KVCache.preallocated(
        1, batch=2, num_kv_heads=2, max_keys=16, head_dim=8, dtype=torch.float64
    )  # fmt: skip


def test_it_is_the_oracle_on_projected_heads():
    layer, tokens = make(qk_norm=True), x()

    def heads(y):
        return y.unflatten(-1, (-1, 8)).transpose(1, 2)

    tables = rope_tables(torch.arange(11), 8)
    q = apply_rope(layer.q_norm(heads(layer.q_proj(tokens))), *tables)
    k = apply_rope(layer.k_norm(heads(layer.k_proj(tokens))), *tables)
    out = oracle_attention(
        q, k, heads(layer.v_proj(tokens)), layer.ssmax.s, is_causal=True, enable_gqa=True
    )
    expected = layer.o_proj(out.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(layer(tokens), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", ["growing", "preallocated"])
def test_any_split_into_chunks_gives_the_same(rule, window, kind):
    layer, tokens = make(rule=rule, window=window), x()
    whole = layer(tokens)
    rng = random.Random(0)
    for _ in range(4):
        cache = dict(caches())[kind]
        pieces, start = [], 0
        while start < 11:
            stop = min(11, start + rng.randint(1, 5))
            pieces.append(layer(tokens[:, start:stop], cache=cache))
            cache.advance(stop - start)
            start = stop
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["growing", "preallocated"])
def test_left_padded_rows_decode_as_they_do_alone(kind):
    layer, tokens = make(), x()
    keep = torch.ones(2, 11, dtype=torch.bool)
    keep[0, :4] = False
    cache, outs = dict(caches())[kind], []
    for piece in (slice(0, 7), slice(7, 8), slice(8, 11)):
        outs.append(layer(tokens[:, piece], cache=cache, key_padding_mask=keep[:, : piece.stop]))
        cache.advance(piece.stop - piece.start)
    out = torch.cat(outs, 1)
    alone = layer(tokens[:1, 4:])
    # RoPE sees only distances, so four positions further on nothing changes but rounding.
    torch.testing.assert_close(out[:1, 4:], alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out[1:], layer(tokens[1:]), rtol=1e-9, atol=1e-11)


def test_packed_documents_come_out_as_each_alone():
    layer, tokens = make(), x(batch=1)
    bounds = torch.tensor([0, 3, 11], dtype=torch.int32)
    alone = torch.cat((layer(tokens[:, :3]), layer(tokens[:, 3:])), 1)
    torch.testing.assert_close(layer(tokens, cu_seqlens=bounds), alone, rtol=1e-5, atol=1e-6)
    positions = torch.cat((torch.arange(3), torch.arange(8)))
    torch.testing.assert_close(layer(tokens, positions=positions), alone, rtol=1e-9, atol=1e-11)


def test_a_bidirectional_layer_sees_all():
    layer, tokens = make(is_causal=False), x()
    changed = tokens.clone()
    changed[:, -1] += 1.0
    assert not torch.allclose(layer(tokens)[:, 0], layer(changed)[:, 0])


def test_what_a_model_shares_between_layers_changes_nothing():
    layer, tokens = make(), x()
    spec = mask_spec(11, 11, is_causal=True)
    out = layer(
        tokens,
        mask_spec=spec,
        num_keys=visible_keys(11, 11, is_causal=True),
        rotary=layer.rotary(torch.arange(11)),
    )
    assert torch.equal(out, layer(tokens))


def test_theta_is_changeable_at_test_time():
    layer, tokens = make(), x()
    before = layer(tokens)
    layer.rotary.theta = 500_000.0
    assert not torch.allclose(layer(tokens), before)
    assert torch.equal(layer(tokens), make(theta=500_000.0)(tokens))


def test_no_rotation_at_all():
    """Without a position code, two equal tokens are one to a later query."""
    layer = make(rotary_dim=0)
    assert layer.rotary.width == 0
    row = x()
    row[:, 3] = row[:, 2]
    swapped = row[:, [1, 0, *range(2, 11)]]
    torch.testing.assert_close(layer(row)[:, 4:], layer(swapped)[:, 4:], rtol=1e-9, atol=1e-11)
    assert not torch.allclose(make()(row)[:, 4:], make()(swapped)[:, 4:])


def test_rotary_on_part_of_the_width():
    layer = make(rotary_dim=4)
    assert layer.rotary(torch.arange(3))[0].shape == (3, 2)
    assert layer(x()).isfinite().all()
    assert "4, theta=10000" in repr(RotaryEmbedding(4))


def test_a_cache_is_written_but_not_advanced():
    layer, tokens = make(), x()
    for _, cache in caches():
        first = layer(tokens[:, :5], cache=cache)
        assert cache.length == 0
        assert torch.equal(layer(tokens[:, :5], cache=cache), first)


def test_a_full_cache_and_foreign_keys_are_refused():
    cache = KVCache.preallocated(1, batch=1, num_kv_heads=2, max_keys=4, head_dim=8)
    keys = torch.randn(1, 2, 3, 8)
    cache.write(0, keys, keys)
    cache.advance(3)
    with pytest.raises(
        ValueError, match="holds 4 keys; 3 are there and 3 more came.*larger max_keys"
    ):
        cache.write(0, keys, keys)
    with pytest.raises(ValueError, match="must fit the cache"):
        cache.write(0, keys[:, :1], keys[:, :1])
    with pytest.raises(ValueError, match="cache's dtype, torch.float32, got torch.float64"):
        cache.write(0, keys.double()[:, :, :1], keys.double()[:, :, :1])
    with pytest.raises(ValueError, match="at least 0"):
        cache.advance(-1)
    grown = KVCache(1)
    grown.write(0, keys, keys)
    grown.advance(3)
    with pytest.raises(ValueError, match="must fit the cache"):
        grown.write(0, keys[..., :4], keys[..., :4])


def test_dropout_only_while_training():
    layer, tokens = make(dropout_p=0.5), x()
    assert not torch.equal(layer(tokens), layer(tokens))
    layer.eval()
    assert torch.equal(layer(tokens), layer(tokens))


def test_layers_share_the_probes_table():
    table = ProbeTable(16)
    layer = make(rule="probe", table=table)
    assert sum("table" in name for name, _ in layer.named_parameters()) == 0


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_autocast_with_qk_norm(backend):
    """Heads are bfloat16 there and the norm's weights float32."""
    layer, tokens = make(qk_norm=True, backend=backend).float(), x().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(tokens)
    assert out.dtype == torch.bfloat16
    exact = layer.double()(tokens.double())
    with torch.autocast("cpu", enabled=False):
        eager = layer.bfloat16()(tokens.bfloat16())
    assert_no_worse_than(out, eager, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_gets_a_gradient(dtype):
    layer = make(rule="ssmax_bias", qk_norm=True).to(dtype)
    layer(x().to(dtype)).square().mean().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    assert (layer.ssmax.s.grad != 0).all()


def test_rules_that_grow_in_steps_take_their_step():
    layer = make(rule="llama4", beta=0.5, floor_length=4)
    assert (layer.ssmax.beta, layer.ssmax.floor_length) == (0.5, 4)
    with pytest.raises(ValueError, match="belong to llama4"):
        make(rule="ssmax", floor_length=4)
    assert "4 heads of 8, 2 of keys, is_causal=True" in repr(layer)


@pytest.mark.parametrize("rule", ["softmax", "llama4", "ssmax_no_s"])
def test_half_of_the_heads_need_no_number_of_heads(rule):
    """What tensor parallelism leaves a rank: some columns of q, k and v, the rest of o."""
    layer, here = make(rule=rule, num_kv_heads=4), make(rule=rule, num_kv_heads=4)
    for name in ("q_proj", "k_proj", "v_proj"):
        part = getattr(here, name)
        part.weight = torch.nn.Parameter(part.weight[:16])
    here.o_proj.weight = torch.nn.Parameter(here.o_proj.weight[:, :16])
    with torch.no_grad():
        layer.o_proj.weight[:, 16:] = 0.0
    torch.testing.assert_close(here(x()), layer(x()))


@pytest.mark.parametrize("rule", ["ssmax", "ssmax_bias", "temperature"])
def test_parameters_that_are_split_over_ranks(rule):
    layer = make(rule=rule)
    expected = layer(x())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for name, value in dict(layer.ssmax.named_parameters()).items():
            split = distribute_tensor(value.detach(), mesh, [Shard(0)])
            setattr(layer.ssmax, name, torch.nn.Parameter(split))
        torch.testing.assert_close(layer(x()), expected)
    finally:
        dist.destroy_process_group()


def test_a_windowed_layer_is_exported_for_lengths_on_both_sides_of_its_window():
    layer = make(window=5).eval()
    tokens = torch.export.Dim("tokens", min=2, max=64)
    exported = torch.export.export(layer, (x(16),), dynamic_shapes={"x_BTC": {1: tokens}})
    for length in (3, 5, 6, 20):
        torch.testing.assert_close(exported.module()(x(length)), layer(x(length)))
