"""The factors: where the log is taken, in which dtype, and what each rule says."""

import math
import subprocess
import sys

import pytest
import torch

from ssmax import initial_s, ssmax_factor
from ssmax.ops import length, scale


def test_initial_s_makes_the_mean_factor_one():
    assert initial_s(1024) == pytest.approx(0.1685, abs=5e-5)
    n = torch.arange(1, 1025, dtype=torch.float64)
    assert (initial_s(1024) * n.log()).mean().item() == pytest.approx(1.0, abs=1e-12)
    assert (length.initial_sqrt_log_s(1024) * n.log().sqrt()).mean().item() == pytest.approx(1.0)


def test_the_factor_is_s_log_n_plus_b_for_every_head_and_query():
    n = torch.tensor([[1, 2, 8], [3, 3, 3]])
    s, b = torch.tensor([0.5, 2.0]), torch.tensor([0.0, 1.0])
    factor = ssmax_factor(n, s, b)
    assert factor.shape == (2, 2, 3)
    for batch in range(2):
        for head in range(2):
            for query in range(3):
                expected = s[head] * math.log(n[batch, query]) + b[head]
                assert factor[batch, head, query].item() == pytest.approx(expected.item(), rel=1e-6)


def test_shapes_follow_n_and_s():
    n, s = torch.arange(1, 6), torch.ones(3)
    assert ssmax_factor(n, 0.5).shape == (5,)
    assert ssmax_factor(n, s).shape == (3, 5)
    assert ssmax_factor(n.expand(2, 5), s).shape == (2, 3, 5)
    assert ssmax_factor(7, s).shape == (3,)
    assert ssmax_factor(7, 0.5).shape == ()
    assert ssmax_factor(n, 0.5, s).shape == (3, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_factor_is_float32_or_wider(dtype):
    assert ssmax_factor(torch.tensor([5]), torch.ones(2, dtype=dtype)).dtype == torch.float32
    assert ssmax_factor(torch.tensor([5]), torch.ones(2).double()).dtype == torch.float64


def test_log_n_tells_neighbours_apart_up_to_ten_million():
    n = torch.tensor([58_032, 61_774, 9_999_900, 10_000_000])
    factor = ssmax_factor(n, torch.ones(1, dtype=torch.bfloat16))[0].double()
    assert torch.allclose(factor, n.double().log(), rtol=1e-6, atol=0.0)
    assert factor.unique().numel() == 4


def test_the_rules_say_what_the_table_of_the_family_says():
    n, length = torch.tensor([1, 2, 100, 1024, 8191, 8192, 16384, 16385, 100_000]), 1024
    log = n.double().log()
    ratio = n.double() / length
    s, b = torch.tensor([0.3, 0.7]).double(), torch.tensor([0.1, -0.2]).double()
    s_, b_ = s[:, None], b[:, None]
    expected = {
        scale.ssmax_factor(n, s): s_ * log,
        scale.ssmax_factor(n, s, b): s_ * log + b_,
        scale.held_ssmax_factor(n, s, length): s_ * log.clamp_max(math.log(length)),
        scale.clamp_factor(n, length): (log / math.log(length)).clamp_min(1),
        scale.llama4_factor(n, 0.1, 8192): 1 + 0.1 * (1 + n // 8192).double().log(),
        scale.ministral3_factor(n, 0.1, 16384): 1 + 0.1 * (1 + (n - 1) // 16384).double().log(),
        scale.yarn_factor(n, length): (0.1 * ratio.clamp_min(1).log() + 1) ** 2,
        scale.sqrt_log_factor(n, s): s_ * log.sqrt(),
        scale.polylog_factor(n, s, b + 1): 1 + s_ * log ** (b_ + 1),
    }
    for factor, table in expected.items():
        torch.testing.assert_close(factor.double(), table.double(), rtol=1e-6, atol=1e-6)


def test_llama4_and_ministral3_step_one_token_apart():
    n = torch.arange(1, 40)
    llama, ministral = scale.llama4_factor(n, 0.1, 8), scale.ministral3_factor(n, 0.1, 8)
    assert torch.equal(llama[:-1], ministral[1:])
    assert not torch.equal(llama, ministral)


def test_the_probe_reads_its_table_and_holds_the_last_value():
    table = torch.tensor([1.0, 2.0, 4.0])
    factor = scale.probe_factor(
        torch.tensor([1, 2, 3, 4, 99]), torch.ones(1), torch.zeros(1), table
    )
    assert factor.tolist() == [[1.0, 2.0, 4.0, 4.0, 4.0]]


@pytest.mark.parametrize("gamma", [-2.0, 0.0, 0.5, 3.0])
def test_polylog_is_finite_at_one_key_for_any_gamma(gamma):
    beta, gamma = torch.ones(1, requires_grad=True), torch.tensor([gamma], requires_grad=True)
    factor = scale.polylog_factor(torch.tensor([1, 2, 3]), beta, gamma)
    factor.sum().backward()
    assert factor[0, 0] == 1.0
    assert beta.grad.isfinite().all() and gamma.grad.isfinite().all()


FIRST_LOG = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.log.default:
            print(args[0].device, args[0].dtype, args[0].numel())
        return function(*args, **(kwargs or {}))


with Watched():
    import ssmax.ops.scale
"""


def test_no_two_threads_take_the_first_log_of_a_process():
    """They may be given kernels of unlike accuracy; the reason stands where the log is taken."""
    done = subprocess.run([sys.executable, "-c", FIRST_LOG], capture_output=True, check=True)
    assert done.stdout.decode().split() == ["cpu", "torch.float32", "1"]
