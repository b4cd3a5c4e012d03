"""Steps of several losses, each with an optimizer of its own, against the backwards and steps that a person writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import PlanError
from tests.helpers.ran import Around, equal, trained
from tests.helpers.sweeps import few, slow

Losses = Mapping[str, Tensor]


def judged(m: Around, x: Tensor) -> Tensor:
    for layer in m.discriminator:
        x = x + layer(x)
    return m.head(x).squeeze(-1)


def gan(m: Around, noise: Tensor, real: Tensor) -> Losses:
    """The discriminator is called three times; the generator's loss reaches it and does not train it."""
    fake, yes = noise, torch.ones(len(real))
    for layer in m.generator:
        fake = fake + layer(fake)
    ends = [(judged(m, real), yes), (judged(m, fake.detach()), 0 * yes), (judged(m, fake), yes)]
    one, two, three = (F.binary_cross_entropy_with_logits(*end) for end in ends)
    return {"discriminator": one + two, "generator": three}


def shared(m: Around, noise: Tensor, real: Tensor) -> Losses:
    """Both losses read one call of the discriminator, nothing is detached, and one loss is a part of the other."""
    fake = noise
    for layer in m.generator:
        fake = fake + layer(fake)
    scores = judged(m, fake)
    generator = F.softplus(-scores).mean()
    return {
        "discriminator": F.softplus(scores).mean() + judged(m, real).square().mean() - generator,
        "generator": generator,
    }


def made(
    function: Callable[..., Losses], drop: float = 0.0
) -> tuple[Around, dict[str, torch.optim.Optimizer], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    names = ("generator", "discriminator")

    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Dropout(drop), nn.Linear(32, 8))

    stacks = {name: nn.ModuleList(block() for _ in range(2)) for name in names}
    module = Around(function, **stacks, head=nn.Linear(8, 1))
    judges = [*module.discriminator.parameters(), *module.head.parameters()]
    optimizers = {
        "generator": torch.optim.AdamW(module.generator.parameters(), lr=1e-2, betas=(0.5, 0.9)),
        "discriminator": torch.optim.SGD(judges, lr=3e-2, momentum=0.9),
    }
    return module, optimizers, (torch.randn(8, 8), torch.randn(8, 8))


@cache
def graph_of(function: Callable[..., Losses]) -> ss.Graph:
    module, optimizers, inputs = made(function)
    return ss.capture(module, inputs, optimizer=optimizers, check=False)


@pytest.mark.parametrize("function", [gan, *slow(shared)])
def test_training_is_that_of_two_backwards_and_two_optimizers(function: Callable[..., Losses]) -> None:
    found = trained(ss.compile(graph_of(function), "data_parallel", "local:2"))
    module, optimizers, inputs = made(function)
    totals = []
    for _ in range(3):
        losses = module(*inputs)
        totals.append(sum(loss.item() for loss in losses.values()))
        for name, optimizer in optimizers.items():
            own = [p for group in optimizer.param_groups for p in group["params"]]
            for p, gradient in zip(own, torch.autograd.grad(losses[name], own, retain_graph=True), strict=True):
                p.grad = gradient
        for optimizer in optimizers.values():
            optimizer.step()
    for losses, weights in found:
        assert losses == pytest.approx(totals, rel=1e-5)
        for name, p in module.named_parameters():
            torch.testing.assert_close(weights[name.replace(".", "_")], p.detach(), rtol=1e-4, atol=1e-6)


PAIRS = [(gan, "zero:stage=2"), (gan, "zero:stage=3"), (gan, "pipeline_1f1b:microbatches=4")]
PAIRS += [(shared, "zero:stage=1"), (shared, "tensor_parallel")]


@pytest.mark.parametrize(("function", "plan"), few(PAIRS, 0))
def test_plans_are_equal_and_return_each_loss(function: Callable[..., Losses], plan: str) -> None:
    found = equal(graph_of(function), plan).found
    assert found["reference"] == "eager", found["note"]
    assert found["output_error"] < 1e-12


def test_an_op_has_a_copy_for_each_loss_whose_gradient_it_carries() -> None:
    """The generator has four products, a call of the discriminator five. The one call on fakes in `shared` carries the
    gradients of both losses, and so it is two; no call of `gan` carries two.
    """
    for function in (gan, shared):
        ops = graph_of(function).forward_ops
        assert sum(op.target == "aten.linear.default" for op in ops) == 4 + 3 * 5


def refused(match: str, change: Callable[[Around, Any], Any], drop: float = 0.0, **options: Any) -> None:
    module, optimizers, inputs = made(shared if drop else gan, drop)
    with pytest.raises(PlanError, match=match):
        ss.capture(module, inputs, optimizer=change(module, optimizers), **options)


def test_refusals_name_what_is_wrong() -> None:
    refused(
        "0.0.weight is a parameter of two.* 'generator' and 'discriminator'",
        lambda m, o: {**o, "discriminator": torch.optim.AdamW(m.parameters())},
    )
    refused(
        "no loss 'd' .* has 'discriminator', 'generator'",
        lambda m, o: {"d": o["discriminator"], "generator": o["generator"]},
    )
    refused("'discriminator' depends on none", lambda m, o: dict(zip(o, reversed(o.values()), strict=True)))
    refused("at least 2 losses", lambda m, o: {"generator": o["generator"]})
    refused("a scaler scales one loss", lambda m, o: o, scaler=torch.amp.GradScaler("cpu"))
    refused("at random on the way to two losses", lambda m, o: o, drop=0.1)
