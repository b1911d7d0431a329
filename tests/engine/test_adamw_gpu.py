"""Our AdamW kernel gives what torch's fused one gives."""

import pytest
import torch
from torch.optim.adamw import adamw

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def torchs(master, gradient, first, second, number, divisor, void):
    found = None if void is None else void.clone()
    adamw(
        [master], [gradient.float()], [first], [second], [], [torch.tensor(number - 1.0, device="cuda")],
        fused=True, foreach=False, grad_scale=divisor, found_inf=found, amsgrad=False, beta1=0.9, beta2=0.95,
        lr=GROUP["lr"], weight_decay=GROUP["weight_decay"], eps=GROUP["eps"], maximize=False,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(1 << 20,), (1000, 333), (7,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divided", [False, True])
def test_a_step(shape, dtype, divided):
    from fullstride.engine.adamw_kernel import step

    torch.manual_seed(0)
    master, first = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda") / 10
    second, gradient = torch.rand(shape, device="cuda") / 10, torch.randn(shape, device="cuda").to(dtype)
    narrow = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
    divisor = torch.tensor(2.5, device="cuda") if divided else None
    wanted = [master.clone(), gradient, first.clone(), second.clone()]
    fine, broken = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    for number in (1, 2, 3):
        step(master, gradient, first, second, narrow, GROUP, number, divisor, fine)
        torchs(*wanted, number, divisor, fine)
    for mine, theirs in zip((master, first, second), (wanted[0], *wanted[2:]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert torch.equal(narrow, master.to(torch.bfloat16))
    before = master.clone(), first.clone(), second.clone(), narrow.clone()
    step(master, gradient, first, second, narrow, GROUP, 4, divisor, broken)
    assert all(torch.equal(a, b) for a, b in zip((master, first, second, narrow), before, strict=True))
    step(master, gradient, first, second, None, GROUP, 4, divisor, None)
    assert torch.equal(narrow, before[3])
    assert not torch.equal(master, before[0])
