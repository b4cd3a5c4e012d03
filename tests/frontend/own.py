"""Operators as users write them, and a model that calls them.

They are registered without the check, which takes seconds in each process that collects tests; test_register.py makes
it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import superscaler as ss


class RmsNorm(torch.autograd.Function):
    backwards = 0

    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx, grad):
        RmsNorm.backwards += 1
        x, weight, scale = ctx.saved_tensors
        own = grad * weight
        grad_x = own * scale - x * scale**3 * (own * x).mean(-1, keepdim=True)
        return grad_x, (grad * x * scale).flatten(0, -2).sum(0), None


@ss.register("b.. h^, h^ -> b.. h", check=False)
def rms_norm(x, weight, eps=1e-6):
    """Scale by the root of the mean square."""
    return RmsNorm.apply(x, weight, eps)


@torch.library.custom_op("superscaler_tests::gate", mutates_args=())
def gate(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight.T)


@gate.register_fake
def _(x, weight):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _backward(ctx, grad):
    x, weight, result = ctx.saved_tensors
    grad = grad * (1 - result * result)
    return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


gate.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output))
ss.register("b.. k^, n k^ -> b.. n", gate, check=False)


@ss.register("b s h^, h^ -> b s h, b s", check=False)
def scale_and_size(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    scaled = x * weight
    return scaled, scaled.square().mean(-1)


@ss.register("b.. k+, n k -> b.. n", check=False)
def project(x, weight):
    return nn.functional.linear(x, weight)


class Block(nn.Module):
    """Calls all of them; `gate` and `project` make a pair whose inner dim can be cut."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.randn(width))
        self.up = nn.Parameter(torch.randn(2 * width, width))
        self.down = nn.Parameter(torch.randn(width, 2 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = x + project(gate(rms_norm(x, self.norm, 1e-5), self.up), self.down)
        scaled, size = scale_and_size(y, self.norm)
        return scaled.mean() + size.square().mean()
