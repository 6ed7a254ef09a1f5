"""linear_cross_entropy: the loss and gradient of the logits that it never makes."""

import pytest
import torch
import torch.nn.functional as F

from ssmax.testing import LargestTensor, assert_no_worse_than
from ssmax_lab.model import loss as api
from ssmax_lab.model.loss import kernels, linear_cross_entropy

pytestmark = pytest.mark.parametrize("impl", ["reference", "triton"])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """At most seven tokens at a time, so that every test crosses chunks."""
    monkeypatch.setattr(api, "CHUNK_BYTES", dict.fromkeys(api.CHUNK_BYTES, 7 * 50 * 8))
    monkeypatch.setattr(api, "COLUMNS_TOGETHER", 1)
    monkeypatch.setattr(kernels, "COLUMNS_AT_A_TIME", 16)


def make(device, dtype=torch.float64, tokens=(3, 11)):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*tokens, 16, dtype=torch.float64, generator=generator)
    weight = torch.randn(50, 16, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, 50, tokens, generator=generator)
    targets[0, :4] = -100
    leaves = (x.to(device, dtype).requires_grad_() for x in (hidden, weight))
    return *leaves, targets.to(device)


def plain(hidden, weight, targets, reduction="mean"):
    logits = (hidden @ weight.t()).flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_value_and_gradient_are_those_of_the_logits(impl, reduction, device):
    hidden, weight, targets = make(device)
    ours = linear_cross_entropy(hidden, weight, targets, reduction=reduction, impl=impl)
    exact = plain(hidden, weight, targets, reduction)
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
    for x, y in zip(
        torch.autograd.grad(3.0 * ours, (hidden, weight)),
        torch.autograd.grad(3.0 * exact, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_gradcheck(impl, device):
    # Along one direction instead of number by number: Triton's interpreter takes its time.
    hidden, weight, targets = make(device, tokens=(1, 12))
    torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, impl=impl),
        (hidden, weight),
        fast_mode=True,
    )


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_only_what_learns_gets_a_gradient(impl, frozen, device):
    hidden, weight, targets = make(device)
    hidden = hidden.detach() if frozen != "weight" else hidden
    weight = weight.detach() if frozen != "hidden" else weight
    out = linear_cross_entropy(hidden, weight, targets, impl=impl)
    exact = plain(hidden, weight, targets)
    torch.testing.assert_close(out, exact)
    assert out.requires_grad == (frozen != "both")
    if frozen != "both":
        leaf = weight if frozen == "hidden" else hidden
        expected = torch.autograd.grad(exact, leaf)[0]
        torch.testing.assert_close(torch.autograd.grad(out, leaf)[0], expected)


def test_the_loss_of_every_token(impl, device):
    hidden, weight, targets = make(device)
    losses = linear_cross_entropy(hidden, weight, targets, reduction="none", impl=impl)
    assert losses.shape == targets.shape and not losses.requires_grad
    exact = plain(hidden, weight, targets, "none").reshape(targets.shape)
    torch.testing.assert_close(losses, exact.detach())
    assert (losses[0, :4] == 0).all()


def test_nothing_to_predict_is_zero_not_nan(impl, device):
    hidden, weight, targets = make(device)
    out = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100), impl=impl)
    assert out.item() == 0.0
    assert all((g == 0).all() for g in torch.autograd.grad(out, (hidden, weight)))


def test_no_tokens_are_no_loss(impl, device):
    hidden, weight, targets = make(device)
    out = linear_cross_entropy(hidden[:0], weight, targets[:0], impl=impl)
    assert out.item() == 0.0
    assert all((g == 0).all() for g in torch.autograd.grad(out, (hidden, weight)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_worse_than_eager(impl, dtype, device):
    def ours(hidden, weight, targets):
        return linear_cross_entropy(hidden, weight, targets, impl=impl)

    results = []
    for function, kind in ((plain, torch.float64), (plain, dtype), (ours, dtype)):
        hidden, weight, targets = make(device, dtype)
        hidden, weight = (x.detach().to(kind).requires_grad_() for x in (hidden, weight))
        out = function(hidden, weight, targets)
        results.append((out, *torch.autograd.grad(out, (hidden, weight))))
    for name, exact, eager, found in zip(("loss", "dhidden", "dweight"), *results, strict=True):
        assert_no_worse_than(found, eager, exact, name=name)


def test_autocast_takes_its_dtype_and_keeps_float32_gradients(impl, device):
    hidden, weight, targets = make(device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = linear_cross_entropy(hidden, weight, targets, impl=impl)
    assert out.dtype == torch.float32
    gradients = torch.autograd.grad(out, (hidden, weight))
    exact = torch.autograd.grad(plain(hidden, weight, targets), (hidden, weight))
    for ours, wide in zip(gradients, exact, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, wide, rtol=0.1, atol=0.02)


def test_no_tensor_of_tokens_times_vocabulary_is_made(impl, device):
    hidden, weight, targets = make(device, tokens=(3, 40))
    with LargestTensor() as watch:
        linear_cross_entropy(hidden, weight, targets, impl=impl).backward()
    assert watch.elements <= 120 * 16 < 120 * 50


@pytest.mark.parametrize("gradient", [False, True])
def test_padding_of_the_vocabulary_has_no_part_in_it(impl, gradient, device):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 50, dtype=torch.float64, generator=generator).to(device)
    targets = torch.tensor([0, 49, -100, 7, 31], device=device)
    # What lies in the padding must not be read: a product leaves zeros there, this leaves poison.
    padded = F.pad(logits, (0, 14), value=torch.inf)
    losses, found = api._losses_and_gradient(padded, targets, 50, -100, gradient, impl)
    leaf = logits.requires_grad_()
    exact = F.cross_entropy(leaf, targets, reduction="none")
    torch.testing.assert_close(losses, exact.detach())
    if gradient:
        expected = F.pad(torch.autograd.grad(exact.sum(), leaf)[0], (0, 14))
        torch.testing.assert_close(found, expected)


def test_hidden_words_do_not_make_the_loss_nan(impl, device):
    """A head may have forbidden its first words: whole blocks of -inf."""
    logits = torch.randn(2, 50, dtype=torch.float64).to(device)
    logits[:, :40] = -torch.inf
    targets = torch.tensor([45, 49], device=device)
    exact = F.cross_entropy(logits, targets, reduction="none")
    losses, gradient = api._losses_and_gradient(logits.clone(), targets, 50, -100, True, impl)
    torch.testing.assert_close(losses, exact)
    assert (gradient[:, :40] == 0).all() and gradient.isfinite().all()


@pytest.mark.gpu
def test_odd_vocabularies_are_padded_for_the_product(impl, device, monkeypatch):
    monkeypatch.setattr(api, "COLUMNS_TOGETHER", 128)
    test_value_and_gradient_are_those_of_the_logits(impl, "sum", device)


# torch.compile does to a Function what torch warns of.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_it_can_be_compiled_whole(impl, backend, device):
    hidden, weight, targets = make(device, torch.float32)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=backend)
    out = compiled(hidden, weight, targets, impl=impl)
    exact = plain(hidden, weight, targets)
    torch.testing.assert_close(out, exact)
    for x, y in zip(
        torch.autograd.grad(out, (hidden, weight)),
        torch.autograd.grad(exact, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


# The interpreter computes with numpy, which warns of NaN.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_ignored_token_may_be_anything(impl, device):
    hidden, weight, targets = make(device)
    spoilt = hidden.detach().clone()
    spoilt[0, 1] = torch.nan  # its target is ignored
    out = linear_cross_entropy(spoilt, weight, targets, reduction="sum", impl=impl)
    torch.testing.assert_close(out, plain(hidden, weight, targets, "sum"))


@pytest.mark.parametrize("learns", ["hidden", "weight", "both"])
def test_a_second_derivative_is_refused_and_not_wrong(impl, learns, device):
    below, weight, targets = make(device)
    below.requires_grad_(learns != "weight")
    weight.requires_grad_(learns != "hidden")
    leaves = [x for x in (below, weight) if x.requires_grad]
    # The hidden states are of a layer, and nobody else holds them.
    out = linear_cross_entropy(2.0 * below, weight, targets, impl=impl)
    gradients = torch.autograd.grad(out, leaves, create_graph=True)
    exact = torch.autograd.grad(plain(2.0 * below, weight, targets), leaves)
    torch.testing.assert_close(tuple(x.detach() for x in gradients), exact)
    for gradient in gradients:
        for leaf in leaves:
            # Through the loss alone the leaf has a gradient: half of the answer must not come.
            with pytest.raises(RuntimeError, match="linear_cross_entropy.*take F.cross_entropy"):
                torch.autograd.grad(out + gradient.square().sum(), leaf, retain_graph=True)


def test_nor_is_it_differentiable_in_what_it_is_multiplied_by(impl, device):
    hidden, weight, targets = make(device)
    out = linear_cross_entropy(hidden, weight, targets, impl=impl)
    size = torch.ones((), dtype=torch.float64, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(out, hidden, size, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy is differentiable once"):
        torch.autograd.grad(gradient.sum(), size)


def test_the_sum_is_the_callers_to_write_into(impl, device):
    hidden, weight, targets = make(device)
    out = linear_cross_entropy(hidden, weight, targets, reduction="sum", impl=impl)
    out /= 3.0
    exact = plain(hidden, weight, targets, "sum") / 3.0
    torch.testing.assert_close(
        torch.autograd.grad(out, (hidden, weight)), torch.autograd.grad(exact, (hidden, weight))
    )


def test_the_gradient_keeps_nothing_of_the_inputs(impl, device):
    hidden, weight, targets = make(device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        linear_cross_entropy(hidden, weight, targets, reduction="sum", impl=impl)
    assert sum(x.numel() for x in kept) == hidden.numel() + weight.numel()
    inputs = {x.data_ptr() for x in (hidden, weight)}
    assert inputs.isdisjoint(x.data_ptr() for x in kept)


def test_without_gradients_none_is_computed(impl, device, monkeypatch):
    hidden, weight, targets = make(device)
    asked = []
    real = api._losses_and_gradient
    monkeypatch.setattr(api, "_losses_and_gradient", lambda *a: (asked.append(a[4]), real(*a))[1])
    with torch.no_grad():
        out = linear_cross_entropy(hidden, weight, targets, impl=impl)
    torch.testing.assert_close(out, plain(hidden, weight, targets).detach())
    assert set(asked) == {False}


BAD = {
    "reduction": (lambda h, w, t, i: linear_cross_entropy(h, w, t, impl=i, reduction="max"), "one of mean, sum, none"),
    "vocabulary": (lambda h, w, t, i: linear_cross_entropy(h, w[:0], t, impl=i), "at least one, got \\(0, 16\\)"),
    "channels": (lambda h, w, t, i: linear_cross_entropy(h, w[:, 1:], t, impl=i), "channels of hidden"),
    "shape": (lambda h, w, t, i: linear_cross_entropy(h, w, t[:, 1:], impl=i), "one token for each"),
    "impl": (lambda h, w, t, i: linear_cross_entropy(h, w, t, impl=i + "s"), "impl must be one of"),
    "dtype": (lambda h, w, t, i: linear_cross_entropy(h, w, t.int(), impl=i), "int64"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_clear_error(impl, name, device):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call(*make(device), impl)
