"""The hand-written block, loss and Adam against torch's own."""

import sys
from types import SimpleNamespace

import torch
from harness import SCRIPTS, load

script = load(SCRIPTS[1])
common = sys.modules["common"]


class Block(torch.autograd.Function):
    """The three functions of a block, put together for gradcheck."""

    @staticmethod
    def forward(ctx, x, w_in, w_out):
        y, h = common.block_forward(x, w_in, w_out)
        ctx.save_for_backward(x, h, w_in, w_out)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, h, w_in, w_out = ctx.saved_tensors
        dx, dz = common.block_backward_input(dy, h, w_in, w_out)
        dw_in, dw_out = torch.zeros_like(w_in), torch.zeros_like(w_out)
        common.block_backward_weight(x, h, dy, dz, dw_in, dw_out)
        return dx, dw_in, dw_out


def test_block_by_gradcheck():
    generator = torch.Generator().manual_seed(1)
    shapes = (5, 4), (4, 7), (4, 7)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    assert torch.autograd.gradcheck(Block.apply, [t.requires_grad_() for t in tensors])


def test_block_with_no_rows():
    y, h = common.block_forward(torch.empty(0, 4), torch.ones(4, 3), torch.ones(4, 3))
    assert y.shape == (0, 4) and h.shape == (0, 3)


def test_loss_gradient():
    y = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    t = torch.randn(6, 4, dtype=torch.float64)
    args = SimpleNamespace(batch_size=6, d_model=4)
    loss, dy = script.loss_and_gradient(y.detach(), t, args, None)
    theirs = torch.nn.functional.mse_loss(y, t)
    theirs.backward()
    torch.testing.assert_close(loss, theirs.detach())
    torch.testing.assert_close(dy, y.grad)


def test_adam():
    args = SimpleNamespace(lr=1e-2)
    weights = torch.randn(2, 3, 2, 5, dtype=torch.float64)
    theirs = weights.clone().requires_grad_()
    adam = torch.optim.Adam([theirs], lr=args.lr)
    zeros = torch.zeros_like(weights)
    state = common.State(weights, zeros, weights, zeros.clone(), zeros.clone(), range(2))
    for step in range(4):
        grads = torch.randn_like(weights)
        theirs.grad = grads * 0.5
        adam.step()
        common.adam_update(state, grads, 0.5, step, args)
        torch.testing.assert_close(state.master, theirs.detach(), rtol=1e-12, atol=1e-12)


def test_data_are_a_bounded_system_and_the_same_for_all():
    args = SimpleNamespace(seed=3, batch_size=8, d_model=5, device="cpu", dtype="float64")
    x, t = common.make_batch(args, 7)
    assert torch.equal(t, common.next_state(x)) and x.abs().max() <= 1
    assert torch.equal(x, common.make_batch(args, 7)[0])
    assert not torch.equal(x, common.make_batch(args, 8)[0])
