"""Families of `transformers` trained three steps under four plans, against their own eager training by torch.

    python benchmarks/eager_steps.py [NAME ...]

The reference is the module, AdamW and three batches, by torch alone; dropout is off in the config. In float64 and in
float32: a cell is how far the weights of a plan are from the eager ones after three steps, relative to how far these
went; `order` is the same of eager steps on batches whose rows are in another order. A loss that is off by more than the
weights counts instead. `inside` is the narrowest dtype that the module computes in: losses of the library are float32.
The weights come out of a checkpoint, into a new module, by `ss.load_weights`. Exits with 1 where a plan is off by more
than LIMIT times what another order of rows makes, in either dtype where the one inside is narrower.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from families import FAMILIES, Tiny, Values, inputs_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import superscaler as ss
from superscaler.artifact import describe, initial_values
from superscaler.comm.threads import run_ranks
from superscaler.runtime.load import modules
from superscaler.runtime.step import build_step

PLANS = {"single": 1, "data_parallel": 2, "zero:stage=3": 2, "tensor_parallel": 2}
DEFAULT = ("gpt2", "opt", "bloom", "falcon", "llama", "gemma2", "bert", "vit", "t5")
STEPS, LIMIT = 3, 30.0
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
Ran = tuple[list[float], dict[str, Tensor]]


def built(tiny: Tiny, dtype: torch.dtype) -> nn.Module:
    """Return a module without dropout, the same at each call."""
    torch.manual_seed(0)
    kind = getattr(transformers, tiny.model)
    config = kind.config_class(**tiny.values)
    for part in (config, *(x for x in vars(config).values() if isinstance(x, transformers.PretrainedConfig))):
        for key, value in vars(part).items():
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.0)
    module: nn.Module = kind(config).train().to(dtype)
    if tiny.model.endswith(("ForCausalLM", "LMHeadModel")):
        module.loss_type = "ForCausalLM"
    return module


def batches(tiny: Tiny, dtype: torch.dtype) -> list[Values]:
    drawn = [inputs_of(tiny.inputs, torch.Generator().manual_seed(k)) for k in range(STEPS)]
    return [{n: x.to(dtype) if _is_float(x) else x for n, x in batch.items()} for batch in drawn]


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


class Seen(TorchDispatchMode):
    """Finds the floating dtypes of what is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.dtypes |= {x.dtype for x in tree_leaves(made) if isinstance(x, Tensor)}
        return made


def narrowest(module: nn.Module, batch: Values) -> torch.dtype:
    with Seen() as seen:
        module(**batch).loss.backward()
    module.zero_grad()
    return max((d for d in seen.dtypes if d.is_floating_point), key=lambda dtype: torch.finfo(dtype).eps)


def eager(module: nn.Module, given: Sequence[Values], make: Callable[..., torch.optim.Optimizer] = ADAMW) -> Ran:
    """Train a copy of a module by torch."""
    module = copy.deepcopy(module)
    optimizer = make([p for p in module.parameters() if p.requires_grad])
    losses = []
    for batch in given:
        optimizer.zero_grad()
        loss = module(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: x.detach() for n, x in module.named_parameters()}


def planned(graph: ss.Graph, plan: str, module: nn.Module, given: Sequence[Values]) -> Ran:
    """Train under a plan, save, and load what was trained into a copy of the module."""
    compiled = ss.compile(graph, plan, ss.Cluster.local(PLANS[plan])).compiled
    described, code = describe(compiled), modules(compiled.emitted.files)
    values = initial_values(compiled.graph.model, compiled.graph.captured.values)
    module = copy.deepcopy(module)
    with tempfile.TemporaryDirectory() as folder:

        def work(communicator: Any) -> list[float]:
            fixed = dict(compiled.graph.captured.fixed) if communicator.rank == 0 else {}
            step = build_step(described, code, values, communicator, fixed)
            losses = [step({n: batch[n] for n in step.inputs}).item() for batch in given]
            step.save(folder)
            return losses

        losses = run_ranks(PLANS[plan], work)[0]
        ss.load_weights(module, folder)
    return losses, {n: x.detach() for n, x in module.named_parameters()}


def off(one: Ran, other: Ran, start: Mapping[str, Tensor]) -> float:
    """Return how far weights are from others, relative to how far these went; or losses, if they are farther."""
    apart = sum(float((x.double() - other[1][n].double()).pow(2).sum()) for n, x in one[1].items())
    went = sum(float((x.double() - start[n].double()).pow(2).sum()) for n, x in other[1].items())
    losses = (abs(a - b) / abs(b) for a, b in zip(one[0], other[0], strict=True))
    return max((apart / went) ** 0.5, *losses)


def cells(name: str, dtype: torch.dtype) -> tuple[torch.dtype, float, list[float]]:
    """Return the dtype inside, and the errors of another order of rows and of each plan."""
    module, given = built(FAMILIES[name], dtype), batches(FAMILIES[name], dtype)
    start = {n: x.detach().clone() for n, x in module.named_parameters()}
    want = eager(module, given)
    turned = [{n: x.flip(0) if isinstance(x, Tensor) else x for n, x in batch.items()} for batch in given]
    graph = ss.capture(module, (), given[0], ADAMW(module.parameters()))
    order = off(eager(module, turned), want, start)
    inside = narrowest(copy.deepcopy(module), given[0])
    return inside, order, [off(planned(graph, plan, module, given), want, start) for plan in PLANS]


def main() -> int:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(
        f"{'three steps':14}{'dtype':>9}{'inside':>9}{'order':>9}" + "".join(f"{plan:>17}" for plan in PLANS),
        flush=True,
    )
    wrong = 0
    for name in sys.argv[1:] or DEFAULT:
        try:
            rows = {dtype: cells(name, dtype) for dtype in (torch.float32, torch.float64)}
        except (ss.PlanError, RuntimeError) as error:
            print(f"{name:14} is not compared: {str(error).splitlines()[0]}", flush=True)
            continue
        for dtype, (inside, order, found) in rows.items():
            most = LIMIT * max(order, rows[torch.float32][1] * (inside != dtype), torch.finfo(inside).eps)
            wrong += not max(found) <= most
            shown = (f"{error:.0e}" + " WRONG" * (not error <= most) for error in found)
            kinds = "".join(f"{str(kind).removeprefix('torch.'):>9}" for kind in (dtype, inside))
            text = f"{name:14}{kinds}{order:>9.0e}" + "".join(f"{x:>17}" for x in shown)
            print(text, flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
