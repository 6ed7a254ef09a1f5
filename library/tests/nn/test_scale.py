"""SSMaxScale: every rule, where it starts, what it learns, and what survives a cast."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ssmax import initial_s
from ssmax.nn import RULES, ProbeTable, Rule, SSMaxScale
from ssmax.ops import scale as rules

NAMES = {
    "softmax", "temperature", "ssmax", "ssmax_no_s", "ssmax_bias", "ssmax_held", "mean_log",
    "probe",
    "entropy_invariant", "clamp", "llama4", "ministral3", "yarn", "sqrt_log", "polylog",
}  # fmt: skip
LEARNT = {
    "temperature": {"s"},
    "ssmax": {"s"},
    "ssmax_bias": {"s", "bias"},
    "ssmax_held": {"s"},
    "probe": {"s", "bias", "table.p"},
    "sqrt_log": {"s"},
    "polylog": {"beta", "gamma"},
}
N = torch.arange(1, 65)
FLOOR = {rule: {"floor_length": 64} for rule in ("llama4", "ministral3")}


def test_every_rule_of_the_family_has_its_name():
    assert set(RULES) == NAMES


@pytest.mark.parametrize("rule", sorted(NAMES))
def test_every_rule_gives_a_factor_per_head_and_query(rule):
    module = SSMaxScale(4, rule, train_length=64)
    assert module(N).shape == (4, 64)
    assert module(N.expand(2, 64)).shape == (2, 4, 64)
    assert module(N).dtype == torch.float32 and module(N).isfinite().all()
    assert {name for name, _ in module.named_parameters()} == LEARNT.get(rule, set())
    assert all(p.dim() == 1 for p in module.parameters()), "weight decay skips what is 1-D"


@pytest.mark.parametrize("rule", sorted(NAMES))
@pytest.mark.parametrize("n", [1, 7, 64])
def test_an_int_is_the_n_of_one_query(rule, n):
    module = SSMaxScale(4, rule, train_length=64).double()
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter)
    torch.testing.assert_close(module(n), module(torch.tensor([n])), rtol=1e-14, atol=1e-14)


S_AND_B = {
    "softmax": lambda m: (0.0, 1.0),
    "temperature": lambda m: (0.0, m.s[:, None]),
    "ssmax": lambda m: (m.s[:, None], 0.0),
    "ssmax_no_s": lambda m: (1.0, 0.0),
    "ssmax_bias": lambda m: (m.s[:, None], m.bias[:, None]),
    "mean_log": lambda m: (0.0, torch.arange(1.0, 65.0).log().mean()),
    "entropy_invariant": lambda m: (1 / math.log(64), 0.0),
}


@pytest.mark.filterwarnings("ignore:the probe's table ends")
@pytest.mark.parametrize("rule", sorted(NAMES))
def test_a_rule_knows_whether_it_is_s_log_n_plus_b(rule):
    module, n = SSMaxScale(2, rule, train_length=64, **FLOOR.get(rule, {})), torch.arange(1, 257)
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    assert (RULES[rule].affine is not None) == (rule in S_AND_B)
    if rule in S_AND_B:
        s, b = S_AND_B[rule](module)
        torch.testing.assert_close(module(n), (s * n.log() + b).expand(2, 256))
        s, b = RULES[rule].affine(module)
        torch.testing.assert_close(module(n), rules.ssmax_factor(n, s, b).expand(2, 256))
    else:
        slope = module(n).diff() / n.log().diff()
        assert slope.max() - slope.min() > 0.1


@pytest.mark.parametrize("rule", sorted(LEARNT))
def test_every_parameter_gets_a_gradient(rule):
    module = SSMaxScale(3, rule, train_length=64)
    if rule == "polylog":
        torch.nn.init.constant_(module.beta, 0.5)
    module(N).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert (parameter.grad != 0).any(), name


@pytest.mark.parametrize(
    "rule", ["ssmax", "ssmax_bias", "ssmax_held", "temperature", "probe", "sqrt_log", "polylog"]
)
def test_training_starts_where_softmax_is_on_average(rule):
    assert SSMaxScale(2, rule, train_length=64)(N).mean().item() == pytest.approx(1.0, abs=1e-5)


def test_test_time_rules_are_softmax_within_their_length_and_sharper_beyond():
    """Llama 4 counts n and steps at L0 itself, Ministral 3 the position and one token later."""
    rules_and_last = {
        SSMaxScale(2, "clamp", train_length=64): 64,
        SSMaxScale(2, "yarn", train_length=64): 64,
        SSMaxScale(2, "llama4", floor_length=64): 63,
        SSMaxScale(2, "ministral3", floor_length=64): 64,
    }
    for module, last in rules_and_last.items():
        assert (module(torch.arange(1, last + 1)) == 1).all(), module
        assert (module(torch.arange(last + 1, last + 9)) > 1).all(), module


def test_held_ssmax_is_ssmax_to_the_training_length_and_a_constant_beyond():
    held, free = (SSMaxScale(2, rule, train_length=64) for rule in ("ssmax_held", "ssmax"))
    assert torch.equal(held(N), free(N))
    assert torch.equal(held(N + 64), free(N[-1:]).expand(2, 64))


def test_mean_log_is_as_large_as_log_n_on_average_at_every_n():
    constant, free = (SSMaxScale(2, rule, train_length=64) for rule in ("mean_log", "ssmax_no_s"))
    assert constant(N).mean().item() == pytest.approx(free(N).mean().item(), rel=1e-6)
    assert torch.equal(constant(100 * N), constant(N[:1]).expand(2, 64))


@pytest.mark.parametrize("rule", sorted(NAMES))
def test_rules_say_whether_they_start_as_softmax(rule):
    """Llama 4's step is at L0 itself."""
    steps = {"floor_length": 64} if RULES[rule].floor_length else {}
    factor = SSMaxScale(2, rule, train_length=64, **steps)(N[:-1])
    assert bool((factor == 1).all()) == RULES[rule].starts_as_softmax


def test_a_rule_of_ones_own_is_known_by_its_name(monkeypatch):
    own = Rule(lambda m, n: m.s[:, None] * n.log1p().unsqueeze(-2), {"s": lambda _: 0.5})
    monkeypatch.setitem(RULES, "log1p", own)
    module = SSMaxScale(3, "log1p")
    torch.testing.assert_close(module(N), (0.5 * N.log1p()).expand(3, -1))
    assert [tuple(p.shape) for p in module.parameters()] == [(3,)]
    # A first value that goes by a length is given one that has a logarithm.
    monkeypatch.setitem(RULES, "log1p", Rule(own.factor, {"s": initial_s}))
    assert SSMaxScale(3, "log1p").s.isfinite().all()


def test_rules_compute_what_the_functions_do():
    module = SSMaxScale(2, "ssmax_bias", train_length=1024)
    assert torch.equal(module.s, torch.full((2,), initial_s(1024)))
    assert torch.equal(module(N), rules.ssmax_factor(N, module.s, module.bias))
    stepped = SSMaxScale(2, "llama4", beta=0.3, floor_length=8)
    assert torch.equal(stepped(N)[0], rules.llama4_factor(N, 0.3, 8))
    far = torch.tensor([8191, 8192, 16384, 16385])
    as_published = {
        "llama4": rules.llama4_factor(far, 0.1, 8192),
        "ministral3": rules.ministral3_factor(far, 0.1, 16384),
    }
    for rule, factor in as_published.items():
        assert torch.equal(SSMaxScale(2, rule)(far)[0], factor)


@pytest.mark.parametrize(
    "cast", [lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to(torch.bfloat16)]
)
def test_s_stays_float32_through_every_cast(cast):
    model = torch.nn.ModuleDict(
        {"linear": torch.nn.Linear(2, 2), "ssmax": SSMaxScale(2, "ssmax_bias", 1000)}
    )
    value = model["ssmax"].s.detach().clone()
    cast(model)
    assert model["linear"].weight.dtype in (torch.float16, torch.bfloat16)
    assert model["ssmax"].s.dtype == model["ssmax"].bias.dtype == torch.float32
    assert torch.equal(model["ssmax"].s, value), "not even rounded on the way"
    assert model.double()["ssmax"].s.dtype == torch.float64
    assert cast(model)["ssmax"].s.dtype == torch.float32, "no wider than it was either"


def test_a_narrow_checkpoint_leaves_s_float32():
    saved = {
        name: value.bfloat16() for name, value in SSMaxScale(2, "probe", 8).state_dict().items()
    }
    for assign in (False, True):
        module = SSMaxScale(2, "probe", 8)
        module.load_state_dict(saved, assign=assign)
        assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}, "the caller's stays"


def test_a_meta_module_becomes_real():
    with torch.device("meta"):
        module = SSMaxScale(2, "ssmax", 64)
        table = ProbeTable(8)
    for part in (module, table):
        part.to_empty(device="cpu")
        part.reset_parameters()
    assert torch.equal(module.s, torch.full((2,), initial_s(64)))
    assert torch.equal(table.p, torch.ones(8))


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_runs_on_shapes_alone(rule):
    with torch.device("meta"):
        module = SSMaxScale(2, rule, 64)
    assert module(torch.arange(1, 6, device="meta")).shape == (2, 5)
    with FakeTensorMode():
        module = SSMaxScale(2, rule, 64)
        assert module(torch.arange(1, 6)).shape == (2, 5)


def test_the_print_out_tells_what_a_rule_has():
    assert "beta=0.2, floor_length=16" in repr(SSMaxScale(2, "llama4", beta=0.2, floor_length=16))
    assert "beta" not in repr(SSMaxScale(2, "ssmax", 64))


def test_a_shared_table_stays_float32_too():
    assert ProbeTable(8).bfloat16().p.dtype == torch.float32


def test_a_shared_table_is_owned_once():
    table = ProbeTable(16)
    layers = torch.nn.ModuleList([SSMaxScale(4, "probe", 16, table=table) for _ in range(3)])
    model = torch.nn.ModuleDict({"table": table, "layers": layers})
    assert sum(p.numel() for p in model.parameters()) == 16 + 3 * 8
    assert [key for key in model.state_dict() if "table" in key] == ["table.p"]
    with torch.no_grad():
        table.p.mul_(3.0)
    assert (layers[2](torch.arange(1, 17)) == 3.0).all()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin["table"].p.mul_(2.0)
    assert (twin["layers"][0](torch.arange(1, 17)) == 6.0).all()
    assert (layers[0](torch.arange(1, 17)) == 3.0).all()


def test_the_probe_says_once_that_its_table_has_ended():
    module = SSMaxScale(2, "probe", train_length=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(torch.arange(1, 9))
    with pytest.warns(UserWarning, match="ends at n = 8.*n = 20 is scaled as n = 8"):
        beyond = module(torch.arange(1, 21))
    assert torch.equal(beyond[:, 7:], beyond[:, 7:8].expand(2, 13))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(torch.arange(1, 21))


@pytest.mark.parametrize("rule", sorted(NAMES))
def test_state_survives_saving_and_copying(rule):
    module = SSMaxScale(2, rule, train_length=64)
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    other = SSMaxScale(2, rule, train_length=64)
    other.load_state_dict(module.state_dict())
    for twin in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(N), module(N))


@pytest.mark.parametrize("rule", ["ssmax", "ssmax_bias"])
def test_an_s_that_is_no_number_is_named(rule):
    module = SSMaxScale(2, rule, train_length=8)
    torch.nn.init.constant_(module.s, torch.nan)
    with pytest.raises(ValueError, match="s holds NaN"):
        module(torch.arange(1, 5))
