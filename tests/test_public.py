"""The public face: what is given to it in a wrong type, or out of range, is one error, and never a traceback."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import superscaler as ss
from superscaler.errors import PlanError

# Each is wrong for most arguments, and right for some.
VALUES: list[Any] = [
    None, 5, -1, 0, 2.5, True, 10**30, float("nan"), "x", "", b"x", [], [5], [None], (1, 2), {}, {5: 5}, object(), int,
    lambda: 1, torch.ones(2),
]  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.b(torch.relu(self.a(x))).square().mean()
        return loss


@cache
def captured() -> ss.Graph:
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    return ss.capture(module, (torch.ones(8, 8),), optimizer=optimizer, check=False)


def graph() -> ss.Graph:
    return captured().copy()


@cache
def plan() -> ss.Plan:
    return ss.compile(captured(), "data_parallel", "local:2")


CLUSTER, OP = ss.Cluster.parse("local:2"), captured().ops[0]


def cut(algorithm: Any) -> Any:
    own = graph()
    return ss.op_trans(own, own.forward_ops, algorithm)


def made(name: str, **given: Any) -> Any:
    return cut(getattr(ss, name)(**given))


def along(**given: Any) -> Any:
    @ss.along_axis(**given)
    def mine(graph: ss.Graph, n: int, axis: str) -> None:
        ss.op_trans(graph, graph.forward_ops, ss.Split("batch", n, axis=axis))

    return ss.compile(captured(), mine, "local:2")


class Own:
    """A user's algorithm, which returns anything."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def cut(self, op: Any, sizes: Any) -> Any:
        return self.made


class Other:
    def __init__(self, made: Any) -> None:
        self.made = made

    def rewrite(self, model: Any, ops: Any) -> Any:
        return self.made


def capture(**given: Any) -> Any:
    return ss.capture(**{"module": Net(), "args": (torch.ones(8, 8),), "optimizer": None, "check": False, **given})


def register(**given: Any) -> Any:
    op = torch.ops.aten.renorm.default
    return ss.register(**{"notation": "b h^ -> b h", "op": op, "example": {"p": 2, "dim": 0, "maxnorm": 1.0}, **given})


Call = tuple[Callable[..., Any], dict[str, Any]]
# Name -> a call, and right arguments of it; each is replaced by each of VALUES.
CALLS: dict[str, Call] = {
    "op_trans": (lambda **k: ss.op_trans(graph(), **k), {"target": OP, "algorithm": ss.Split("batch", 2)}),
    "op_assign": (lambda **k: ss.op_assign(graph(), **k), {"target": OP, "device": 0}),
    "op_order": (lambda **k: ss.op_order(graph(), **k), {"before": OP, "after": captured().ops[1], "turns": False}),
    "order": (lambda **k: ss.order(graph(), **k), {"rows": [[ss.Action(0, "F", 0)]], "stages": [[OP]], "whole": True}),
    "place": (
        lambda **k: ss.place(graph(), **k),
        {"parameter": "a.weight", "parts": ss.Shard(2), "devices": [0, 1], "ahead": 1},
    ),
    **{
        name: (partial(made, name), given)
        for name, given in {
            "Split": {"factor": "batch", "parts": 2, "sizes": (), "required": False, "axis": "", "at": ()},
            "Replicate": {"parts": 2, "mirror": None, "axis": "", "at": ()},
            "Shard": {"parts": 2, "axis": ""},
            "ValueSplit": {"parts": 2, "operand": 0, "axis": ""},
            "Microbatch": {"parts": 2, "factor": "batch"},
            "Stage": {"number": 0, "axis": "pp"},
            "AttentionBlocks": {"parts": 2, "again": False},
            "Dispatch": {"capacity": None},
            "Insert": {"tensor": ""},
            "Recompute": {"copies": False},
            "Stale": {"updates": 1},
        }.items()
    },
    "Algorithm": (lambda made: cut(Own(made)), {"made": None}),
    "Axis": (
        lambda **k: cut(Own(ss.Axis(**k))),
        {"index": 0, "sizes": (4, 4), "mirror": "copy", "is_microbatch": False, "partial_inputs": (), "name": ""}
        | {"at": ()},
    ),
    "Rewrite": (lambda made: cut(Other(made)), {"made": None}),
    "Mesh": (ss.Mesh, {"sizes": {"dp": 2}, "devices": [0, 1]}),
    "Cluster.mesh": (CLUSTER.mesh, {"dp": 2}),
    "Mesh.at": (CLUSTER.mesh(dp=2).at, {"dp": 0}),
    "Device": (
        lambda **k: ss.op_assign(graph(), OP, ss.Device(**k)),
        {"id": 0, "server": 0, "kind": "local", "is_host": False},
    ),
    "Action": (
        lambda **k: ss.order(graph(), [[ss.Action(**k)]], [captured().forward_ops]),
        {"stage": 0, "kind": "F", "microbatch": 0},
    ),
    "Cluster": (ss.Cluster.parse, {"spec": "local:2"}),
    "Cluster.local": (ss.Cluster.local, {"n": 2}),
    "Cluster.preset": (ss.Cluster.preset, {"name": "v100", "servers": 1, "devices_per_server": 2}),
    "Cluster.seconds": (CLUSTER.seconds, {"kind": "all_reduce", "groups": [[0, 1]], "size": 8.0}),
    "Cluster.devices": (lambda key: CLUSTER.devices[key], {"key": 0}),
    "capture": (
        capture,
        dict.fromkeys(("kwargs", "autocast", "scaler", "precision", "optimizer"))
        | {"module": Net(), "args": (torch.ones(8, 8),), "outputs": False},
    ),
    "compile": (ss.compile, {"graph": captured(), "sprogram": "data_parallel", "cluster": "local:2"}),
    "search": (
        ss.search,
        {"graph": captured(), "cluster": "a100:1x2", "where": "rows = 8, tp = 1"}
        | {"memory": 10**9, "system": ss.System(), "seconds": 1.0, "batches": [8]},
    ),
    "System": (
        ss.System,
        dict.fromkeys(("torch_compile", "cuda_graph", "fused", "sum_halves", "no_prefetch", "broadcast"), False)
        | {"attention": "", "overlap": "", "documents": (), "balance": 1.0},
    ),
    "load": (ss.load, {"directory": "none", "manifest": True, "torch_compile": False, "cuda_graph": False}),
    "load_weights": (ss.load_weights, {"module": Net(), "path": "none", "ema": False}),
    "register": (register, {"notation": "b h^ -> b h", "sizes": None, "check": False, "device": "cpu"}),
    "register.example": (register, {"example": None}),
    "register.op": (lambda what: ss.register("b h^ -> b h", check=False)(what), {"what": None}),
    "sprogram": (ss.sprogram, {"function": along}),
    "schedule_1f1b": (ss.schedule_1f1b, {"devices": 2, "microbatches": 2}),
    "stages": (lambda **k: ss.stages(graph(), **k), {"count": 2, "blocks": "", "ops": ()}),
    "decompose_losses": (lambda **k: ss.decompose_losses(graph(), **k), {"parts": 2}),
    "tensor_splits": (
        lambda **k: ss.tensor_splits(graph(), **k), {"parts": 2, "axis": "", "in_blocks": True, "lookups": False}
    ),
    "along_axis": (along, dict.fromkeys(("first", "batches", "recomputes", "last", "nests"), False)),
    "along_axis.def": (lambda what: ss.along_axis()(what), {"what": None}),
    "along_axis.bare": (ss.along_axis, {}),
    "batches": (lambda **k: next(ss.batches(**k)), {"step": None, "data": [], "seed": 0}),
    "Plan.save": (lambda **k: plan().save("plan", **k), {"seed": 0, "evaluation": None}),
    "Plan.simulate": (
        lambda **k: plan().simulate(**k),
        {"capacity": None, "system": ss.System()},
    ),
    "Plan": (lambda other: plan().diff(other), {"other": None}),
    "Graph": (lambda **k: graph().select(**k), {"module": None, "ops": None, "microbatch": None, "kind": "F"}),
    "Graph.op": (lambda **k: graph().op(**k), {"name": "x"}),
    "Graph.unroll": (lambda **k: graph().unroll(**k), {"iterations": 2}),
    "Graph.rename_factor": (lambda **k: graph().rename_factor(**k), {"old": "batch", "new": "b"}),
    "Graph.ops": (lambda key: captured().ops[key], {"key": 0}),
    "Graph.blocks": (lambda key: captured().blocks[key], {"key": 0}),
    "Parts": (lambda key: ss.op_trans(graph(), OP, ss.Split("batch", 2))[key], {"key": 0}),
    "Parts.flat": (lambda key: cut(ss.Split("batch", 2))[key], {"key": 0}),
}  # fmt: skip
# Those without an argument, those that a plan gets from others, and errors.
NOT_CALLED = {"Block", "Decompose", "Group", "InputError", "Op", "PlanError", "Regather", "Save", "SplitBackward"}


def test_every_public_name_is_called() -> None:
    assert {name.partition(".")[0] for name in CALLS} | NOT_CALLED | {"__version__"} == set(ss.__all__)


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_value_is_an_error_of_the_plan(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, right = CALLS[name]
    for key in right:
        for value in VALUES:
            # Any other error is a traceback for the user.
            with suppress(PlanError):
                call(**{**right, key: value})


HERE = r"test_public.py:\d+"
SAID: dict[str, tuple[Callable[[], Any], str]] = {
    "register": (lambda: ss.register(5), f"{HERE}: notation of register is 5; give text, as"),  # type: ignore[arg-type]
    "register bare": (lambda: ss.register(captured), f"{HERE}: register needs a notation; write @ss.register"),  # type: ignore[arg-type]
    "devices": (lambda: CLUSTER.devices[5], f"{HERE}: there is no device 5; choose a number from 0 to 1"),
    "blocks": (lambda: captured().blocks[0], f"{HERE}: there is no block 0; there are none"),
    "parts": (
        lambda: ss.op_trans(graph(), OP, ss.Split("batch", 2))[7],
        rf"{HERE}: .* has 2 parts, and none at \[7\]; choose numbers",
    ),
    "own": (lambda: cut(Own(3)), f"{HERE}: Own of .* gives 3; its method cut must return an Axis"),
    "at": (lambda: CLUSTER.mesh(dp=2).at(dp="x"), "mesh dp=2 has no place 'x'; a place is a number"),  # type: ignore[arg-type]
    "mesh": (lambda: ss.Mesh(5, [0]), f"Mesh at .*{HERE}: sizes is 5 of type int; give Mapping"),  # type: ignore[arg-type]
    "microbatch": (lambda: ss.Microbatch("2"), f"Microbatch at .*{HERE}: parts is '2' of type str; give int"),  # type: ignore[arg-type]
    "along_axis": (lambda: ss.along_axis(along), f"{HERE}: along_axis is given .*; write @ss.along_axis\\(\\)"),
    "along_axis.def": (lambda: ss.along_axis()(plan), f"{HERE}: along_axis needs a function of a graph"),  # type: ignore[arg-type]
    "sprogram": (lambda: ss.sprogram(5), f"{HERE}: sprogram marks a function of a graph and a cluster, not 5"),  # type: ignore[arg-type]
    "weights": (lambda: ss.load_weights(Net(), 5), f"load_weights at .*{HERE}: path is 5 of type int; give str"),  # type: ignore[arg-type]
    "batches": (lambda: ss.batches(5, []), "batches needs the step that ss.load returns, not 5"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", SAID)
def test_the_error_names_the_value_the_line_and_the_remedy(name: str) -> None:
    call, message = SAID[name]
    with pytest.raises(PlanError) as caught:
        call()
    assert re.search(message, str(caught.value)), caught.value
