"""Weight gradients that wait arrive whole, by autograd's own way."""

import torch

from fullstride.engine.deferred import Deferred, gradient


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight, gradient(ctx.weight, lambda: grad.t() @ x)


def test_a_deferred_gradient_equals_an_immediate_one_and_hooks_see_it():
    torch.manual_seed(0)
    x, weight = (
        torch.randn(3, 4, dtype=torch.float64, requires_grad=True),
        torch.nn.Parameter(torch.randn(5, 4, dtype=torch.float64)),
    )
    _Product.apply(x, weight).square().sum().backward()
    wanted, wanted_x = weight.grad, x.grad
    weight.grad = x.grad = None
    seen = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    waiting = Deferred()
    for _ in range(2):
        with waiting.collect():
            _Product.apply(x, weight).square().sum().backward()
    assert weight.grad is None and len(waiting) == 2
    torch.testing.assert_close(x.grad, 2 * wanted_x)
    waiting.run()
    assert len(waiting) == 0 and seen == [False, False, True, True]
    torch.testing.assert_close(weight.grad, 2 * wanted)
