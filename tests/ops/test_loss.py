"""linear_cross_entropy: the loss and gradient of the logits that it never makes."""

import pytest
import torch
import torch.nn.functional as F

from ssmax.ops import loss
from ssmax.ops.loss import linear_cross_entropy
from ssmax.testing import LargestTensor, assert_no_worse_than


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Seven tokens at a time, so that every test crosses chunks."""
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 7 * 50)


def make(dtype=torch.float64, tokens=(3, 11)):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*tokens, 16, dtype=torch.float64, generator=generator)
    weight = torch.randn(50, 16, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, 50, tokens, generator=generator)
    targets[0, :4] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def plain(hidden, weight, targets, reduction="mean"):
    logits = (hidden @ weight.t()).flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_value_and_gradient_are_those_of_the_logits(reduction):
    hidden, weight, targets = make()
    ours = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
    exact = plain(hidden, weight, targets, reduction)
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
    for x, y in zip(
        torch.autograd.grad(3.0 * ours, (hidden, weight)),
        torch.autograd.grad(3.0 * exact, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_gradcheck():
    hidden, weight, targets = make(tokens=(1, 9))
    torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, targets), (hidden, weight))


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_only_what_learns_gets_a_gradient(frozen):
    hidden, weight, targets = make()
    hidden = hidden.detach() if frozen != "weight" else hidden
    weight = weight.detach() if frozen != "hidden" else weight
    out = linear_cross_entropy(hidden, weight, targets)
    assert out.requires_grad == (frozen != "both")
    if frozen != "both":
        leaf = weight if frozen == "hidden" else hidden
        exact = torch.autograd.grad(plain(hidden, weight, targets), leaf)[0]
        torch.testing.assert_close(torch.autograd.grad(out, leaf)[0], exact)


def test_the_loss_of_every_token():
    hidden, weight, targets = make()
    losses = linear_cross_entropy(hidden, weight, targets, reduction="none")
    assert losses.shape == targets.shape and not losses.requires_grad
    exact = plain(hidden, weight, targets, "none").reshape(targets.shape)
    torch.testing.assert_close(losses, exact.detach())
    assert (losses[0, :4] == 0).all()


def test_nothing_to_predict_is_zero_not_nan():
    hidden, weight, targets = make()
    out = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    assert out.item() == 0.0
    assert all((g == 0).all() for g in torch.autograd.grad(out, (hidden, weight)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_worse_than_eager(dtype):
    results = []
    for function, kind in ((plain, torch.float64), (plain, dtype), (linear_cross_entropy, dtype)):
        hidden, weight, targets = make(dtype)
        hidden, weight = (x.detach().to(kind).requires_grad_() for x in (hidden, weight))
        out = function(hidden, weight, targets)
        results.append((out, *torch.autograd.grad(out, (hidden, weight))))
    for name, exact, eager, ours in zip(("loss", "dhidden", "dweight"), *results, strict=True):
        assert_no_worse_than(ours, eager, exact, name=name)


def test_autocast_takes_its_dtype_and_keeps_float32_gradients():
    hidden, weight, targets = make(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = linear_cross_entropy(hidden, weight, targets)
    assert out.dtype == torch.float32
    gradients = torch.autograd.grad(out, (hidden, weight))
    exact = torch.autograd.grad(plain(hidden, weight, targets), (hidden, weight))
    for ours, wide in zip(gradients, exact, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, wide, rtol=0.1, atol=0.02)


def test_no_tensor_of_tokens_times_vocabulary_is_made():
    hidden, weight, _ = make(tokens=(4, 100))
    targets = torch.randint(0, 50, (4, 100))
    with LargestTensor() as watch:
        linear_cross_entropy(hidden, weight, targets).backward()
    assert watch.elements <= 400 * 16 < 400 * 50


BAD = {
    "reduction": (lambda h, w, t: linear_cross_entropy(h, w, t, reduction="max"), "one of mean, sum, none"),
    "channels": (lambda h, w, t: linear_cross_entropy(h, w[:, 1:], t), "channels of hidden"),
    "shape": (lambda h, w, t: linear_cross_entropy(h, w, t[:, 1:]), "one token for each"),
    "dtype": (lambda h, w, t: linear_cross_entropy(h, w, t.int()), "int64"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_clear_error(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call(*make())
