import pytest
import torch
from torch.nn import functional as F

from lightning_memfit.techniques.linear_cross_entropy import linear_cross_entropy


def inputs(shape=(4, 10), width=16, classes=50, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    hidden = torch.randn(*shape, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, width, dtype=dtype, requires_grad=True)
    offset = torch.randn(classes, dtype=dtype, requires_grad=True) if bias else None
    target = torch.randint(0, classes, shape)
    target.view(-1)[::7] = -100
    return hidden, weight, target, offset


def whole(hidden, weight, target, bias, ignore_index=-100):
    logits = F.linear(hidden, weight, bias).float()
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=ignore_index, reduction="sum")


def gradients(loss, values):
    (0.3 * loss).backward()
    return [loss.detach(), *(value.grad for value in values if value is not None)]


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients(num_chunks, bias):
    hidden, weight, target, offset = inputs(bias=bias)
    expected = gradients(whole(hidden, weight, target, offset), (hidden, weight, offset))
    hidden, weight, target, offset = inputs(bias=bias)
    loss = linear_cross_entropy(hidden, weight, target, offset, num_chunks=num_chunks)
    for ours, theirs in zip(gradients(loss, (hidden, weight, offset)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_autocast_gives_what_autocast_gives():
    with torch.autocast("cpu", torch.bfloat16):
        hidden, weight, target, offset = inputs()
        expected = gradients(whole(hidden, weight, target, offset), (hidden, weight, offset))
        hidden, weight, target, offset = inputs()
        actual = gradients(linear_cross_entropy(hidden, weight, target, offset, num_chunks=3), (hidden, weight, offset))
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-6, atol=0)
    for ours, theirs in zip(actual[1:], expected[1:], strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_extreme_logits():
    hidden, weight, target, offset = inputs()
    big = (100 * hidden).detach().requires_grad_()
    loss = linear_cross_entropy(big, weight, target, offset)
    torch.testing.assert_close(loss, whole(big, weight, target, offset))
    loss.backward()
    assert torch.isfinite(big.grad).all()


def test_frozen_weight_and_no_gradients():
    hidden, weight, target, offset = inputs()
    weight.requires_grad_(False)
    linear_cross_entropy(hidden, weight, target, offset).backward()
    assert weight.grad is None
    assert hidden.grad is not None
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, target, offset)
    torch.testing.assert_close(loss, whole(hidden, weight, target, offset).detach())


def test_all_ignored():
    hidden, weight, target, _ = inputs()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(target, -100))
    assert loss == 0
    loss.backward()
    assert not weight.grad.any()


def test_second_backward_is_refused():
    hidden, weight, target, _ = inputs()
    loss = linear_cross_entropy(hidden, weight, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ChunkedLoss .* second backward pass"):
        loss.backward()


def test_what_is_done_to_logits_before_the_loss():
    def cap(logits):
        return 3.0 * torch.tanh(logits / 3.0)

    hidden, weight, target, offset = inputs()
    expected = F.cross_entropy(cap(F.linear(hidden, weight, offset)).flatten(0, 1), target.flatten(), reduction="sum")
    loss = linear_cross_entropy(hidden, weight, target, offset, num_chunks=3, change=cap)
    torch.testing.assert_close(loss, expected)
    leaves = hidden, weight, offset
    for ours, theirs in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs)
