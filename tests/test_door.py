"""What stands at the door: light imports, and one clear error for each wrong input."""

import ast
import dataclasses
import importlib
import inspect
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import ssmax
from ssmax import nn
from ssmax.ops.visible import mask_spec
from ssmax_lab.train.config import TrainConfig

T, S, H, G, D = 6, 6, 4, 2, 8


def test_importing_ssmax_loads_no_torch_and_is_quick():
    code = (
        "import sys, time; start = time.process_time(); import ssmax; "
        "print(time.process_time() - start, 'torch' in sys.modules)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(3)
    ]
    assert all(run[1] == "False" for run in runs)
    assert min(float(run[0]) for run in runs) < 0.05


def test_every_public_name_is_there_and_documented():
    for name in ssmax.__all__:
        assert getattr(ssmax, name).__doc__, name
    assert set(ssmax.__all__) <= set(dir(ssmax))
    with pytest.raises(AttributeError, match="no attribute 'ssmx'"):
        ssmax.ssmx  # noqa: B018 (the access is the test)


@pytest.mark.parametrize(
    "package", ["ssmax", "ssmax_lab.model", "ssmax.hf", "ssmax.ops", "ssmax.export"]
)
def test_the_type_checker_and_dir_know_what_is_loaded_on_first_use(package):
    code = f"import {package} as it; print(*(name for name in dir(it) if name[0] != '_'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = importlib.import_module(package)
    assert done.stdout.split() == here.__all__
    source = Path(here.__file__).read_text()
    stubs = {
        alias.asname: node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert sorted(stubs) == sorted(here.__all__)
    for name, home in stubs.items():
        # `from package import name` imports a module of the package.
        is_module = home == package
        found = importlib.import_module(f"{home}.{name}" if is_module else home)
        assert getattr(here, name) is (found if is_module else getattr(found, name)), name


def heads(number=H, tokens=T, width=D, batch=2, **kwargs):
    return torch.randn(batch, number, tokens, width, **kwargs)


def attend(q=None, k=None, v=None, s=0.3, **options):
    q, k = heads() if q is None else q, heads() if k is None else k
    return ssmax.ssmax_attention(
        q, k, torch.randn(k.shape).to(k.dtype) if v is None else v, s, **options
    )


def visible(**options):
    return ssmax.visible_keys(T, S, **{"is_causal": True, **options})


def bounds(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def turn(q=None, k=None, tables=None, factor=None, **options):
    q, k = heads() if q is None else q, heads() if k is None else k
    cos, sin = ssmax.rope_tables(torch.arange(T), D) if tables is None else tables
    return ssmax.rope_scale(
        q, k, cos, sin, torch.ones(H, T) if factor is None else factor, **options
    )


def tables(tokens=T, width=D):
    return ssmax.rope_tables(torch.arange(tokens), width)


TOKENS = torch.ones(2, S, dtype=torch.bool)
NAN = torch.tensor([0.1, math.nan, 0.1, 0.1])

BAD = {
    # attention: q, k, v
    "rank 3": (lambda: attend(q=heads()[0]), r"q must have 4 dimensions.*got shape \(4, 6, 8\)"),
    "v of rank 2": (lambda: attend(v=torch.randn(6, 8)), "v must have 4 dimensions"),
    "integer q": (lambda: attend(q=heads().long()), "q must be floating point, got torch.int64"),
    "integer v": (lambda: attend(v=heads().int()), r"v must be floating point.*v\.float\(\)"),
    "q of numpy": (lambda: attend(q=heads().numpy()), "q must be a tensor.*got ndarray"),
    "q nested": (lambda: ssmax.ssmax_attention(*[torch.nested.nested_tensor([torch.randn(H, 3, D), torch.randn(H, 2, D)], layout=torch.jagged)] * 3, 0.3), "q must be a tensor.*got a nested tensor.*cu_seqlens"),
    "k and v differ": (lambda: attend(v=heads(tokens=5)), "k and v must agree"),
    "batches differ": (lambda: attend(q=heads(batch=3)), "q and k must agree in batch"),
    "widths differ": (lambda: attend(q=heads(width=4)), "q and k must agree in batch and head_dim"),
    "dtypes differ": (lambda: attend(q=heads().double()), "one dtype, got torch.float64"),
    "heads do not divide": (lambda: attend(k=heads(3), enable_gqa=True), "multiple of key heads, got 4 and 3"),
    "grouped unasked": (lambda: attend(k=heads(G)), "pass enable_gqa=True"),
    # attention: s and bias
    "s per key head": (lambda: attend(k=heads(G), s=torch.ones(G), enable_gqa=True), r"expected \(4,\), got \(2,\).*count query heads, not key heads"),
    "tokens before heads": (lambda: attend(q=heads().transpose(1, 2), k=heads().transpose(1, 2), s=torch.ones(H)), r"expected \(6,\), got \(4,\).*is q \(batch, heads, tokens, head_dim\)\?"),
    "s of rank 2": (lambda: attend(s=torch.ones(H, 1)), r"one value per query head.*got \(4, 1\)"),
    "s a string": (lambda: attend(s="0.43"), "s must be a number or a tensor"),
    "s of integers": (lambda: attend(s=torch.ones(H, dtype=torch.long)), "s must be floating point"),
    "NaN in s": (lambda: attend(s=NAN), "s holds NaN"),
    "infinite s": (lambda: attend(s=torch.tensor([math.inf, 1.0, 1.0, 1.0])), "s holds inf; the training"),
    "infinite bias": (lambda: attend(bias=-math.inf), "bias holds -inf"),
    "NaN in bias": (lambda: attend(bias=NAN), "bias holds NaN"),
    "bias of the wrong length": (lambda: attend(bias=torch.ones(7)), r"bias must hold one value per query head.*\(7,\)"),
    # attention: masks
    "causal and mask": (lambda: attend(is_causal=True, attn_mask=torch.ones(T, S).bool()), "is_causal goes with.*not with attn_mask"),
    "mask of another shape": (lambda: attend(attn_mask=torch.ones(T, 5).bool()), r"broadcast to \(batch, heads, 6 queries, 6 keys\), got \(6, 5\)"),
    "mask of rank 1": (lambda: attend(attn_mask=torch.ones(S).bool()), "attn_mask must have 2 to 4 dimensions"),
    "mask of other heads": (lambda: attend(attn_mask=torch.ones(3, T, S).bool()), "4 heads"),
    "mask of integers": (lambda: attend(attn_mask=torch.ones(T, S).long()), r"boolean \(True is visible\) or floating.*attn_mask\.bool\(\)"),
    "padding of integers": (lambda: attend(key_padding_mask=TOKENS.long()), r"must be boolean.*mask\.bool\(\)"),
    "padding too short": (lambda: attend(key_padding_mask=TOKENS[:, 1:]), r"must be \(batch, 6 keys\), got \(2, 5\).*cached keys too"),
    "padding of another batch": (lambda: attend(key_padding_mask=TOKENS[:1]), "a row for each of the 2 rows"),
    # attention: windows, packing, positions
    "window 0": (lambda: visible(window=0), "window must be at least 1.*got 0"),
    "window negative": (lambda: attend(window=-3), "window must be at least 1.*pass None"),
    "window a float": (lambda: visible(window=2.5), r"window must be an int W.*or a pair"),
    "window of three": (lambda: visible(window=(1, 2, 3)), r"pair \(left, right\)"),
    "window pair below -1": (lambda: visible(window=(-2, 0)), "-1 for unbounded"),
    "cu_seqlens from 1": (lambda: visible(cu_seqlens=bounds(1, 3, 6)), "must start at 0"),
    "cu_seqlens to 5": (lambda: attend(is_causal=True, cu_seqlens=bounds(0, 3, 5)), "end at the number of keys"),
    "cu_seqlens falls": (lambda: visible(cu_seqlens=bounds(0, 4, 2, 6)), r"never fall, got \[0, 4, 2, 6\]"),
    "cu_seqlens float": (lambda: visible(cu_seqlens=bounds(0, 6, dtype=torch.float32)), "cu_seqlens must be int32 or int64"),
    "cu_seqlens of rank 2": (lambda: visible(cu_seqlens=bounds(0, 6)[None]), "cu_seqlens must be 1-D"),
    "cu_seqlens of one": (lambda: visible(cu_seqlens=bounds(0)), "cu_seqlens must be 1-D, the start of every document"),
    "cu_seqlens with too many queries": (lambda: ssmax.visible_keys(7, 6, is_causal=True, cu_seqlens=bounds(0, 6)), "got 7 queries for 6 keys"),
    "positions float": (lambda: visible(positions=torch.zeros(T)), "positions must be integers"),
    "positions of a stretched context": (lambda: visible(positions=torch.arange(T) / 2), "rope_tables, or to SelfAttention as rotary="),
    "positions shared": (lambda: visible(positions=torch.arange(T) // 2), "must rise by 1 inside a document and begin the next one at 0, got 1 after 1"),
    "positions that begin at 3": (lambda: visible(positions=torch.tensor([0, 1, 2, 3, 3, 4])), "got 3 after 3"),
    "positions with gaps, both ways": (lambda: visible(is_causal=False, positions=2 * torch.arange(T)), "must rise by 1 inside a document.*got 2 after 0"),
    "positions of a row": (lambda: attend(is_causal=True, positions=torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 1]])), "got 1 after 1"),
    "positions too few": (lambda: visible(positions=torch.zeros(3).long()), r"with 6 queries, got \(3,\)"),
    "positions negative": (lambda: visible(positions=torch.tensor([-1, 0, 1, 2, 3, 4])), "at least 0, got -1"),
    "positions of another batch": (lambda: attend(is_causal=True, positions=torch.zeros(3, T).long()), "a row for each of the 2 rows"),
    "positions both ways in a cache": (lambda: ssmax.visible_keys(2, 6, is_causal=False, positions=torch.tensor([0, 1])), "must cover every key"),
    "negative size": (lambda: ssmax.visible_keys(-1, 3, is_causal=True), "num_queries must be a whole number, at least 0, got -1"),
    # attention: n, backend, the rest
    "num_keys 0": (lambda: attend(num_keys=0), "num_keys must be at least 1.*got 0"),
    "num_keys negative in a tensor": (lambda: attend(num_keys=torch.tensor([1, 2, -3, 4, 5, 6])), "num_keys must be at least 1"),
    "num_keys of another length": (lambda: attend(num_keys=torch.ones(5)), r"broadcast to \(6 queries,\).*got \(5,\)"),
    "num_keys boolean": (lambda: attend(num_keys=TOKENS), "num_keys must be numbers"),
    "unknown backend": (lambda: attend(backend="flashy"), "one of auto, cudnn, flash, efficient, math, varlen, eager, got 'flashy'"),
    "cudnn on the CPU": (lambda: attend(backend="cudnn"), "backend='cudnn' cannot serve this call: it needs CUDA"),
    "dropout 1": (lambda: attend(dropout_p=1.0), "dropout_p must be at least 0 and below 1"),
    "scale of NaN": (lambda: attend(scale=math.nan), "scale must be a finite number"),
    "infinite scale": (lambda: attend(scale=-math.inf, is_causal=True), "scale must be a finite number"),
    "scale a tensor": (lambda: attend(scale=torch.tensor(0.5)), "scale must be a finite number"),
    "rows with a scale of NaN": (lambda: ssmax.attention_rows(heads(), heads(), 0.3, [0], scale=math.nan), "scale must be a finite number"),
    "rows outside": (lambda: ssmax.attention_rows(heads(), heads(), 0.3, [6]), r"rows must lie in -6\.\.5, got 6"),
    "rows of floats": (lambda: ssmax.attention_rows(heads(), heads(), 0.3, torch.tensor([0.5])), "rows must be a list of query indices"),
    # ssmax
    "ssmax of integers": (lambda: ssmax.ssmax(torch.arange(3), 0.3), r"z must be floating point.*z\.float\(\)"),
    "ssmax of a number": (lambda: ssmax.ssmax(torch.tensor(1.0), 0.3), "dim must name one of the 0 dimensions"),
    "ssmax along dim 3": (lambda: ssmax.ssmax(torch.ones(2), 0.3, dim=3), "dim must name one of the 1 dimensions"),
    "ssmax, s along dim": (lambda: ssmax.ssmax(torch.ones(2, 3), torch.ones(3)), r"size 1 along dim -1, got \(3,\).*\(H, 1, 1\)"),
    "ssmax, NaN in s": (lambda: ssmax.ssmax(torch.ones(2), math.nan), "s holds NaN"),
    "ssmax, mask of floats": (lambda: ssmax.ssmax(torch.ones(2), 0.3, mask=torch.zeros(2)), "mask must be boolean"),
    "ssmax, mask of another shape": (lambda: ssmax.ssmax(torch.ones(2), 0.3, mask=torch.ones(3).bool()), r"broadcast to the shape of z, \(2,\), got \(3,\)"),
    "mask of integers to count": (lambda: ssmax.num_visible_keys(torch.ones(3).int()), "mask must be boolean"),
    "initial_s of one token": (lambda: ssmax.initial_s(1), "at least 2 tokens, got 1"),
    "initial_s of half a token": (lambda: ssmax.initial_s(10.5), "whole number"),
    # rope and rope_scale
    "odd rotary width": (lambda: ssmax.rope_tables(torch.arange(3), 5), "even and at least 0, got 5"),
    "theta 0": (lambda: ssmax.rope_tables(torch.arange(3), 4, theta=0.0), "theta must be positive"),
    "tables too wide": (lambda: turn(tables=tables(width=D + 2)), "rotate 10 channels, a head has 8"),
    "tables of other tokens": (lambda: turn(tables=tables(tokens=5)), r"\(6 tokens, rotary width / 2\).*got \(5, 4\)"),
    "cos and sin differ": (lambda: turn(tables=(tables()[0], tables()[1][:, :2])), "cos and sin must be floating point and of one shape"),
    "integer heads to turn": (lambda: turn(q=heads().long()), "heads must be floating point"),
    "q and k of other tokens": (lambda: turn(k=heads(tokens=6, batch=1)), "q and k must have one batch"),
    "q and k of other dtypes": (lambda: turn(k=heads().double()), "q and k must have one dtype"),
    "factor that cannot broadcast": (lambda: turn(factor=torch.ones(3, T)), r"broadcast to \(batch, query heads, tokens\) = \(2, 4, 6\), got \(3, 6\)"),
    "integer factor": (lambda: turn(factor=torch.ones(H, T).long()), "factor must be floating point"),
    "unknown impl": (lambda: turn(impl="cuda"), "impl must be one of auto, reference, triton, got 'cuda'"),
    "tables that learn": (lambda: turn(tables=tuple(t.requires_grad_() for t in tables()), impl="triton"), "no gradient for cos and sin"),
    # n and s at the factor itself
    "factor of no keys": (lambda: ssmax.ssmax_factor(0, 0.4), "num_keys must be at least 1.*got 0"),
    "factor of -1 keys": (lambda: ssmax.ssmax_factor(torch.tensor([3, -1]), 0.4), "num_keys must be at least 1"),
    "factor of endless keys": (lambda: ssmax.ssmax_factor(math.inf, 0.4), "finite"),
    "factor of keys without end": (lambda: ssmax.ssmax_factor(torch.tensor([3.0, math.inf]), 0.4), "finite, got inf"),
    "factor of a list": (lambda: ssmax.ssmax_factor([1, 2], 0.3), "num_keys must be a number or a tensor, got list"),
    "scale of a list": (lambda: nn.SSMaxScale(4, "ssmax", 64)([3]), "num_keys must be a number or a tensor, got list"),
    "scale of n per head": (lambda: nn.SSMaxScale(4, "ssmax", 64)(torch.ones(2, 4, 6)), r"got \(2, 4, 6\); an n of its own for every head"),
    "ssmax of a list": (lambda: ssmax.ssmax([1.0, 2.0], 0.3), "z must be a tensor, got list"),
    "n of a list": (lambda: ssmax.num_visible_keys([True]), "mask must be a tensor, got list"),
    "tables of a list": (lambda: ssmax.rope_tables([0, 1], 4), "positions must be a tensor, got list"),
    "a number as factor": (lambda: turn(factor=2.0), "factor must be a tensor, got float"),
    "rope_ssmax of an int": (lambda: ssmax.rope_ssmax(heads(), heads(), *tables(), 9, 0.3), "num_keys must be a tensor.*got int"),
    "flash with dropout": (lambda: attend(backend="flash", dropout_p=0.1), "no such kernel for torch.float32.*dropout 0.1"),
    "factor of NaN": (lambda: ssmax.ssmax_factor(3, math.nan), "s holds NaN"),
    "factor with a bias of NaN": (lambda: ssmax.ssmax_factor(3, 0.4, NAN), "bias holds NaN"),
    "a layer's factor of no keys": (lambda: nn.SSMaxScale(4, train_length=16)(0), "num_keys must be at least 1.*got 0"),
    "padding and positions of other batches": (lambda: visible(key_padding_mask=TOKENS, positions=torch.zeros(3, T).long()), "positions must be.*the 2 rows"),
    "attention to endless keys": (lambda: attend(num_keys=math.inf), "finite"),
    # lists, strings, integers
    "a list for cu_seqlens": (lambda: visible(cu_seqlens=[0, 6]), "cu_seqlens must be a tensor, got list"),
    "a list for a mask": (lambda: attend(attn_mask=[[True]]), "attn_mask must be a tensor, got list"),
    "a list for positions": (lambda: visible(positions=[0] * 6), "positions must be a tensor"),
    "ssmax, s a string": (lambda: ssmax.ssmax(torch.ones(2), "0.4"), "s must be a number or a floating tensor"),
    "ssmax, s an integer tensor": (lambda: ssmax.ssmax(torch.ones(2), torch.tensor(1)), "s must be a number or a floating tensor"),
    "initial_s of NaN": (lambda: ssmax.initial_s(math.nan), "whole number"),
    "initial_s of a word": (lambda: ssmax.initial_s("a"), "whole number"),
    "a window of booleans": (lambda: visible(window=(True, False)), "window must be an int W"),
    "a mask of another batch": (lambda: attend(attn_mask=torch.ones(3, 1, T, S).bool()), "batch 2"),
    # modules
    "unknown rule": (lambda: nn.SSMaxScale(4, "ssmaxx", 16), "rule must be one of softmax, temperature, ssmax,.*got 'ssmaxx'"),
    "no train_length": (lambda: nn.SSMaxScale(4), "rule='ssmax' needs train_length"),
    "train_length 1": (lambda: nn.SSMaxScale(4, "yarn", 1), "at least 2 tokens, got 1"),
    "no heads": (lambda: nn.SSMaxScale(0, "softmax"), "num_heads must be at least 1"),
    "beta for ssmax": (lambda: nn.SSMaxScale(4, "ssmax", 16, beta=0.1), "beta and floor_length belong to llama4 and ministral3"),
    "a table for ssmax": (lambda: nn.SSMaxScale(4, "ssmax", 16, table=nn.ProbeTable(16)), "table belongs to rule='probe'"),
    "floor_length 0": (lambda: nn.SSMaxScale(4, "llama4", floor_length=0), "floor_length must be at least 1"),
    "a single n": (lambda: nn.SSMaxScale(4, "softmax")(torch.tensor(3)), "num_keys must be"),
    "odd width of a rotary": (lambda: nn.RotaryEmbedding(7), "even and at least 0, got 7"),
    "width that does not divide": (lambda: nn.SelfAttention(30, 4, rule="softmax"), "hidden_size must be a multiple of num_heads, got 30 and 4"),
    "key heads that do not divide": (lambda: nn.SelfAttention(32, 4, num_kv_heads=3, rule="softmax"), "multiple of key heads, got 4 and 3"),
    "rotary wider than the head": (lambda: nn.SelfAttention(32, 4, rotary_dim=16, rule="softmax"), "rotary_dim must be at most head_dim, 8"),
    "x of rank 2": (lambda: nn.SelfAttention(32, 4, rule="softmax")(torch.ones(3, 32)), r"x must be \(batch, tokens, hidden size\)"),
    "a layer with an unknown backend": (lambda: nn.SelfAttention(32, 4, rule="softmax", backend="nope"), "backend must be one of"),
    "a layer with dropout 1.5": (lambda: nn.SelfAttention(32, 4, rule="softmax", dropout_p=1.5), "dropout_p must be"),
    "a layer with window -3": (lambda: nn.SelfAttention(32, 4, rule="softmax", window=-3), "window must be at least 1"),
    "padding of another batch for a layer": (lambda: nn.SelfAttention(32, 4, rule="softmax")(torch.ones(3, 6, 32), key_padding_mask=TOKENS), "a row for each of the 3 rows"),
    "mask_spec of other tokens": (lambda: nn.SelfAttention(32, 4, rule="softmax")(torch.ones(1, 5, 32), mask_spec=mask_spec(3, 3, is_causal=True)), "mask_spec must be of 5 queries"),
    "mask_spec and padding": (lambda: nn.SelfAttention(32, 4, rule="softmax")(torch.ones(2, 6, 32), mask_spec=mask_spec(6, 6, is_causal=True), key_padding_mask=TOKENS), "mask_spec says what is visible"),
    "a negative theta": (lambda: nn.RotaryEmbedding(4, theta=-1.0), "theta must be positive"),
    "n of three dimensions": (lambda: nn.SSMaxScale(4, "softmax")(torch.ones(2, 4, 3).long()), "num_keys must be"),
    "a table of another length": (lambda: nn.SSMaxScale(4, "probe", 1024, table=nn.ProbeTable(16)), "ends at n = 16, train_length is 1024"),
    "advancing past what was written": (lambda: nn.KVCache(2).advance(3), "every layer must have written"),
    "no layers": (lambda: nn.KVCache(0), "num_layers must be at least 1"),
    "no room": (lambda: nn.KVCache.preallocated(1, batch=1, num_kv_heads=1, max_keys=0, head_dim=8), "max_keys.*at least 1"),
    "keys and values of other tokens": (lambda: nn.KVCache(1).write(0, heads(), heads(tokens=5)), "keys and values must agree"),
    "a layer too many": (lambda: nn.KVCache(1).write(1, heads(), heads()), r"layer must lie in 0\.\.0, got 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_clear_error(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_numbers_of_numpy_are_numbers():
    q, k, v = heads(), heads(), heads()
    expected = ssmax.ssmax_attention(q, k, v, 0.25, is_causal=True, window=3)
    window, s = np.int64(3), np.float32(0.25)
    assert torch.equal(ssmax.ssmax_attention(q, k, v, s, is_causal=True, window=window), expected)
    assert ssmax.initial_s(np.int64(64)) == ssmax.initial_s(64)
    assert torch.equal(ssmax.ssmax(q, s), ssmax.ssmax(q, 0.25))
    scale = nn.SSMaxScale(4, "probe", 64.0)
    assert scale.train_length == 64
    for n in (np.int64(3), 3.0):
        assert torch.equal(scale(n), scale(3))
    assert ssmax.attention_rows(q, k, 0.3, []).shape == (2, 4, 0, 6)


def test_positions_may_leave_out_what_a_cache_has_dropped_and_padding_is_free():
    kept = torch.tensor([0, 1, 4, 5, 0, 1])
    assert visible(positions=kept).tolist() == [1, 2, 3, 4, 1, 2]
    for wrong in ([0, 1, 4, 5, 0, 3], [3, 4, 0, 2, 3, 4]):
        with pytest.raises(ValueError, match="rise by 1 inside a document"):
            visible(positions=torch.tensor(wrong))
    # The first new token of a cache may begin a document.
    with pytest.raises(ValueError, match="got 2 after 0"):
        ssmax.visible_keys(2, 6, is_causal=True, positions=torch.tensor([0, 2]))
    keep = torch.tensor([[False, False, False, True, True, True]])
    padded = torch.tensor([[1, 1, 1, 0, 1, 2]])
    assert visible(positions=padded, key_padding_mask=keep).tolist() == [[1, 1, 1, 1, 2, 3]]
    with pytest.raises(ValueError, match="got 1 after 1"):
        visible(positions=padded)


def test_every_setting_of_a_run_is_in_the_reference_and_says_what_it_is():
    text = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
    for room in dataclasses.fields(TrainConfig):
        kind = type(room.default_factory())
        assert f"\n::: {kind.__module__}.{kind.__name__}\n" in text, room.name
        source = inspect.getsource(kind)
        for field in dataclasses.fields(kind):
            assert re.search(rf'^    {field.name}: .+\n    """', source, re.M), field.name


def test_rooms_that_the_api_lists_are_there():
    import_of = "import ssmax, ssmax_lab.tiny; ssmax_lab.tiny.run_folder; ssmax.ops.scale"
    subprocess.run([sys.executable, "-c", import_of], check=True)
    with pytest.raises(AttributeError, match="no attribute 'los'"):
        ssmax.ops.los  # noqa: B018 (the access is the test)
