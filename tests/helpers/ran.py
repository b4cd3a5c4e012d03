"""Plans that are compiled, certified, run and compared: what most tests ask of a plan, in one line each.

`equal` compares two steps in float64. What depends on the trained dtype is compared by `Plan.verify`, of a few plans of
each kind in `tests/plans/test_equal.py`; `tests/integration/test_twin.py` shows that both exchange the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.artifact import initial_values
from superscaler.compiler import Compiled, finish, transform
from superscaler.emit.device import Emitted
from superscaler.frontend.base.oracle import Reference, retyped
from superscaler.ir.communication import links
from superscaler.ir.program import Collective, Instruction, Program, Send
from superscaler.plans import resolve
from superscaler.runtime.step import Step
from superscaler.verify import compare_with_eager
from superscaler.verify.locate import Values, on_threads
from superscaler.verify.oracles import Oracle, oracles_of, retype

SProgram = Callable[[ss.Graph, ss.Cluster], Any]
T = TypeVar("T")


class Ran(NamedTuple):
    """A plan in float64, and the results of `compare_with_eager`."""

    compiled: Compiled
    found: dict[str, Any]

    @property
    def program(self) -> Program:
        return self.compiled.program

    @property
    def graph(self) -> ss.Graph:
        return self.compiled.graph

    def code(self, rank: int = 0) -> Sequence[Instruction]:
        return self.program.devices[rank].instructions


def exact(graph: ss.Graph, plan: SProgram | str, cluster: int | str = 2) -> Compiled:
    """Return a plan on so many devices, or on a cluster, compiled in float64 without dropout."""
    where = ss.Cluster.parse(f"local:{cluster}" if isinstance(cluster, int) else cluster)
    planned, _ = transform(graph, resolve(plan) if isinstance(plan, str) else plan, where)
    return finish(retype(planned, "float64"), where)


def rewritten(compiled: Compiled, emitted: Emitted) -> Compiled:
    """Return a compiled plan with other source than that of its program."""
    changed = replace(compiled)
    changed.__dict__["emitted"] = emitted
    return changed


def equal(graph: ss.Graph, plan: SProgram | str, cluster: int | str = 2) -> Ran:
    """Return a plan once it is certified, equal to the module in float64, and sends as many bytes as it says."""
    compiled = exact(graph, plan, cluster)
    with patch("superscaler.verify.run.oracles_of", _oracles):
        found = compare_with_eager(compiled)
    assert found["equal"], found
    assert found["bytes_moved"] == found["bytes_planned"]
    return Ran(compiled, found)


# By captured graph: what its module does in the first step of each plan, which starts from the same weights.
_FIRST: dict[int, tuple[object, Values, Reference]] = {}


def _oracles(plan: Compiled, inputs: Values, dtype: torch.dtype | None) -> dict[str, Callable[[], Oracle]]:
    """Return the oracles of a plan, of which the module does not repeat its first step."""
    made, captured = oracles_of(plan, inputs, dtype), plan.graph.captured

    def eager() -> Oracle:
        oracle = made["eager"]()
        return lambda known, number: oracle(known, number) if number else _first(captured, known, oracle)

    return {**made, "eager": eager}


def _first(captured: object, known: Values, oracle: Oracle) -> Reference:
    if id(captured) not in _FIRST:
        # Some graphs are enough: tests of a graph follow each other.
        while len(_FIRST) > 5:
            del _FIRST[next(iter(_FIRST))]
        _FIRST[id(captured)] = captured, {name: value.clone() for name, value in known.items()}, oracle(known, 0)
    _, before, found = _FIRST[id(captured)]
    is_same = before.keys() == known.keys() and all(torch.equal(before[name], known[name]) for name in known)
    return found if is_same else oracle(known, 0)


def kinds(program: Program) -> Counter[str]:
    """Return how many collectives of each kind there are, and messages (`send`)."""
    code = [(device.rank, i) for device in program.devices for i in device.instructions]
    found = Counter(i.kind for rank, i in code if isinstance(i, Collective) and i.group[0] == rank)
    return found + Counter("send" for _, i in code if isinstance(i, Send))


def moved(program: Program) -> Counter[tuple[str, str, str]]:
    """Return the bytes that collectives put on links, by kind, dtype and `wide`."""
    found = Counter[tuple[str, str, str]]()
    for i in (i for device in program.devices for i in device.instructions if isinstance(i, Collective)):
        found[i.kind, i.dtype, i.wide] += i.bytes * links(i.kind, len(i.group)) // len(i.group)
    return found


class Around(nn.Module):
    """A module around a function, which is called with the module, for its layers, and the inputs."""

    def __init__(self, function: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def captured(
    make: Callable[[], tuple[nn.Module, Any]],
    lr: float = 0.1,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **options: Any,
) -> ss.Graph:
    """Capture the module and its inputs (a tensor, a tuple, or a dict) that `make` returns, and an optimizer, without a
    check of the capture: plans of it are compared with the module.
    """
    torch.manual_seed(0)
    module, inputs = make()
    args = () if isinstance(inputs, dict) else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    trained = [p for p in module.parameters() if p.requires_grad]
    options.setdefault("check", False)
    options.setdefault("optimizer", kind(trained, lr=lr) if trained else None)
    return ss.capture(module, args, inputs if isinstance(inputs, dict) else {}, **options)


def on_ranks(plan: ss.Plan | Compiled, run: Callable[[Step], T]) -> list[T]:
    """Return the results of `run` on the step of each rank of a plan, each in a thread."""
    compiled = plan.compiled if isinstance(plan, ss.Plan) else plan
    values = initial_values(compiled.graph.model, compiled.graph.captured.values)
    return on_threads(compiled, {n: v.clone() for n, v in as_in(compiled, values).items()}, run, 60.0)


def as_in(compiled: Compiled, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return values in float64 if the weights of a plan are."""
    is_exact = any(tensor.dtype == "float64" for tensor in compiled.graph.model.parameters())
    return {name: retyped(value, torch.float64) if is_exact else value for name, value in values.items()}


def trained(plan: ss.Plan | Compiled, steps: int = 3, **options: Any) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Return the losses of some steps on the captured batch, and the weights after these, of each rank."""
    compiled = plan.compiled if isinstance(plan, ss.Plan) else plan
    batch = as_in(compiled, compiled.graph.captured.batch)

    def train(step: Step) -> tuple[list[float], dict[str, Tensor]]:
        losses = [float(step(batch, **options)) for _ in range(steps)]
        return losses, {n: w.detach() for n, w in step.state.weights.items()}

    return on_ranks(compiled, train)
