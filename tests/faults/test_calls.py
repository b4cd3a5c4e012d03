"""Calls of a careless user: each is refused in one short message that says what is wrong, and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import InputError, PlanError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.embedding(input_ids)).flatten(0, 1), labels.flatten())


def batch(**other: Any) -> dict[str, Any]:
    return {"input_ids": torch.arange(24).reshape(4, 6) % 16, "labels": torch.arange(24).reshape(4, 6) % 16, **other}


def capture(**options: Any) -> ss.Graph:
    net = Net()
    return ss.capture(net, kwargs=batch(), optimizer=torch.optim.SGD(net.parameters(), lr=0.1), **options)


class Context(NamedTuple):
    graph: ss.Graph
    plan: ss.Plan
    step: Any
    folder: Path


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    graph, folder = capture(), tmp_path_factory.mktemp("calls")
    plan = ss.compile(graph, "single", "local:1")
    plan.save(folder / "plan", evaluation=False)
    (folder / "file").write_text("x")
    return Context(graph, plan, ss.load(folder / "plan"), folder)


def quiet(c: Context, guard: Any) -> None:
    with guard:
        c.step(batch())


def cut(c: Context, algorithm: Any) -> None:
    graph = c.graph.copy()
    ss.op_trans(graph, graph.forward_ops[0], algorithm)


def assign(c: Context, device: Any) -> None:
    graph = c.graph.copy()
    ss.op_assign(graph, graph.ops, device)


def stage(c: Context, number: Any) -> None:
    graph = c.graph.copy()
    ss.order(graph, [[ss.Action(number, "F", 0)]], [graph.forward_ops])


def generator(graph: ss.Graph, cluster: ss.Cluster) -> Iterator[int]:
    yield 1


def no_argument() -> None:
    return None


def foreign() -> None:
    ss.capture(Net(), kwargs=batch(), optimizer=torch.optim.SGD(Net().parameters(), lr=0.1))


IDS = batch()["input_ids"]
# What is called -> what is said.
CALLS: dict[str, tuple[Callable[[Context], Any], str]] = {
    "step in no_grad": (lambda c: quiet(c, torch.no_grad()), "outside of torch.no_grad"),
    "a name too many": (lambda c: c.step(batch(x=IDS)), "the batch has .x.; this plan reads"),
    "a name missing": (lambda c: c.step({"labels": IDS}), "the batch has labels, but no 'input_ids'"),
    "an id too large": (lambda c: c.step(batch(input_ids=IDS + 1)), "'input_ids' has 16, but the model has 16 rows"),
    "a label too large": (lambda c: c.step(batch(labels=IDS + 9)), "'labels' has 24, but the model has 16 rows"),
    "a list": (lambda c: c.step([1]), "a batch is a dict of tensors by name, not list"),
    "text": (lambda c: c.step(batch(labels="x")), "'labels' is of str"),
    "floats": (lambda c: c.step(batch(labels=IDS.float())), "'labels' is of torch.float32"),
    "another shape": (lambda c: c.step(batch(labels=IDS[:2])), r"has shape \(2, 6\), but .* for \(4, 6\)"),
    "a meta tensor": (lambda c: c.step(batch(labels=IDS.to("meta"))), "'labels' is a meta tensor"),
    "a sparse tensor": (lambda c: c.step(batch(labels=IDS.to_sparse())), "'labels' is a torch.sparse_coo tensor"),
    "clip nan": (lambda c: c.step(batch(), clip=float("nan")), "clip cannot be nan"),
    "clip zero": (lambda c: c.step(batch(), clip=0), "clip cannot be 0"),
    "clip text": (lambda c: c.step(batch(), clip="1"), "clip cannot be '1'"),
    "rate nan": (lambda c: setattr(c.step, "lr", float("nan")), "step.lr cannot be nan"),
    "rates too many": (lambda c: setattr(c.step, "lr", [1, 2]), "2 learning rates .* has 1 parameter groups"),
    "an empty state": (lambda c: c.step.load_state_dict({}), "takes a result of"),
    "steps of text": (lambda c: c.step.load_state_dict({**c.step.state_dict(), "steps": "1"}), "takes a result of"),
    "a state without weights": (
        lambda c: c.step.load_state_dict({**c.step.state_dict(), "weights": {}}), "weight .* has shape None in this"),
    "compile a module": (lambda c: ss.compile(Net(), "single", "local:1"), "graph that ss.capture returns, not Net"),
    "compile without a plan": (lambda c: ss.compile(c.graph, None, "local:1"), "needs an sProgram, not None"),
    "compile for a number": (lambda c: ss.compile(c.graph, "single", 4), "needs a Cluster, not 4"),
    "a billion devices": (lambda c: ss.compile(c.graph, "data_parallel", "local:1000000000"), "1000000000"),
    "no devices": (lambda c: ss.compile(c.graph, "single", "local:0"), "1 servers with 0 devices each"),
    "no cluster": (lambda c: ss.compile(c.graph, "single", ""), "cluster"),
    "an unknown key": (lambda c: ss.compile(c.graph, "single:x=1", "local:1"), "takes no keys|unknown key 'x'"),
    "no stages": (lambda c: ss.compile(c.graph, "pipeline_1f1b:stages=0", "local:2"), "stages=0 on 2 devices"),
    "no microbatches": (
        lambda c: ss.compile(c.graph, "pipeline_1f1b:stages=2,microbatches=0", "local:2"), "microbatches=0 of"),
    "more microbatches than rows": (
        lambda c: ss.compile(c.graph, "pipeline_1f1b:stages=2,microbatches=5", "local:2"), "=5 of a batch of 4"),
    "more copies than devices": (lambda c: ss.compile(c.graph, f"hybrid:dp={10**20}", "local:2"), f"{10**20}"),
    "a generator": (lambda c: ss.compile(c.graph, generator, "local:1"), "generator is a generator or async"),
    "a plan without arguments": (lambda c: ss.compile(c.graph, no_argument, "local:1"),
        r"too many positional arguments; write def no_argument\(graph, cluster\)\.$"),
    "a plan that does nothing": (lambda c: ss.compile(c.graph, lambda graph, cluster: None, "local:1"), "on no device"),
    "precision of a dtype": (lambda c: capture(precision=torch.bfloat16), "unknown precision 'torch.bfloat16'"),
    "autocast of a dtype": (lambda c: capture(autocast=torch.bfloat16), "unknown autocast 'torch.bfloat16'"),
    "a scaler of a number": (lambda c: capture(scaler=1), "takes a torch.amp.GradScaler as scaler, not 1"),
    "capture of nothing": (lambda c: ss.capture(None), "capture needs a torch.nn.Module, not None; give the module"),
    "no optimizer": (lambda c: ss.capture(Net(), kwargs=batch()), "needs the optimizer of the training step"),
    "an optimizer of another module": (lambda c: foreign(), "optimizer"),
    "a billion copies": (lambda c: cut(c, ss.Replicate(10**9)), "into 1000000000 parts; choose at most 16777216"),
    "a billion parts": (lambda c: cut(c, ss.Split("batch", 10**9)), "into 1000000000 parts; choose at most 16777216"),
    "no parts": (lambda c: cut(c, ss.Split("batch", 0)), "0 parts"),
    "nan parts": (lambda c: cut(c, ss.Split("batch", float("nan"))), "parts is nan of type float; give int"),
    "sizes of text": (lambda c: cut(c, ss.Split("batch", sizes="ab")), "sizes is 'ab' of type str; give Sequence"),
    "no factor": (lambda c: cut(c, ss.Split(None, 2)), "factor is None of type NoneType"),
    "no algorithm": (lambda c: cut(c, "batch"), "needs an algorithm such as Split"),
    "no graph": (lambda c: ss.op_trans(None, c.graph.ops, ss.Split("batch", 2)), "takes the graph first, not NoneType"),
    "assign nothing": (lambda c: assign(c, None), "needs devices of the cluster"),
    "assign nan": (lambda c: assign(c, float("nan")), "needs devices of the cluster"),
    "assign too far": (lambda c: assign(c, 10**30), "needs devices of the cluster"),
    "assign to a number": (lambda c: ss.op_assign(c.graph.copy(), 1, 2), "a verb takes ops, parts"),
    "assign tuples of ops": (
        lambda c: ss.op_assign(c.graph.copy(), [c.graph.ops], 0), r"list of them, not a tuple\.$"
    ),
    "assign by name": (lambda c: ss.op_assign(c.graph.copy(), "linear", 0), r"not 'linear'; graph.op\(NAME\) returns"),
    "assign swapped": (lambda c: ss.op_assign(c.graph.copy(), 0, c.graph.ops), r"from 0, not an Op \(\w+\)\.$"),
    "trans swapped": (
        lambda c: ss.op_trans(c.graph.copy(), ss.Split("batch", 2), c.graph.ops), r"such as Split.*, not a tuple\.$"  # type: ignore[call-overload]
    ),
    "assign beyond": (
        lambda c: ss.compile(c.graph, lambda graph, cluster: ss.op_assign(graph, graph.ops, 7), "local:2"),
        r"^op_assign at .*test_calls.py:\d+: \w+ is assigned to device 7, but local:2 has devices 0 to 1\.$"),
    "a copy of a number": (
        lambda c: ss.op_trans(c.graph.copy(), c.graph.forward_ops, ss.Insert(5)), r"tensor is 5 of type int; give str"  # type: ignore[arg-type]
    ),
    "a group and an op": (lambda c: c.graph.select() | c.graph.ops[0], r"\| Op\(.* only groups of graph.select are"),
    "a stage of text": (lambda c: stage(c, "0"), r"is no action; give two numbers and a kind"),
    "a stage from the end": (lambda c: stage(c, -1), r"names stage -1, but there are 1; give all"),
    "select Q": (lambda c: c.graph.select(kind="Q"), "unknown kind of work 'Q'"),
    "select a microbatch of text": (lambda c: c.graph.select(kind="F", microbatch="x"), "microbatch is 'x' of type"),
    "sizes of a number": (lambda c: cut(c, ss.Split("batch", sizes=3)), "sizes is 3 of type int; give Sequence"),
    "place a list": (lambda c: ss.place(c.graph, [2], ss.Split("x", 2), 0), r"parameter is \[2\] of type list; give"),
    "follow a list": (lambda c: c.graph.follow([2]), r"update is \[2\] of type list; give Op \| str"),
    "rename to a number": (lambda c: c.graph.rename_factor("batch", 3), "new is 3 of type int; give str"),
    "select a module 3": (lambda c: c.graph.select(module=3), r"module is 3 of type int; give str \| None"),
    "select ops 3": (lambda c: c.graph.select(ops=[3]), r"ops is \[3\] of type list; give Iterable\[Op \| Parts\]"),
    "rows of numbers": (lambda c: ss.order(c.graph, [3]), r"rows is \[3\] of type list"),
    "count of text": (lambda c: ss.stages(c.graph, "2"), r"^stages at .*test_calls.py:\d+: count is '2' of type str"),
    "losses of None": (lambda c: ss.decompose_losses(None, 2), "graph is None of type NoneType; give Graph"),
    "schedule of text": (lambda c: ss.schedule_1f1b(2, "2"), "microbatches is '2' of type str; give int"),
    "a cluster of a number": (lambda c: ss.Cluster.parse(3), "spec is 3 of type int; give str"),
    "diff of a number": (lambda c: c.plan.diff(3), "other is 3 of type int; give Plan"),
    "an unknown op": (lambda c: c.graph.op("nope"), "unknown op 'nope'"),
    "save to nothing": (lambda c: c.plan.save(None), "directory is None of type NoneType"),
    "save to a file": (lambda c: c.plan.save(c.folder / "file"), "is a file; choose a directory"),
    "save to a long name": (lambda c: c.plan.save(c.folder / ("x" * 300)), "cannot be"),
    "save where nobody may": (lambda c: c.plan.save("/proc/superscaler"), "cannot be written"),
    "load what is not there": (lambda c: ss.load(c.folder / "none"), "has no plan.json.; name one that"),
    "load nothing": (lambda c: ss.load(None), "directory is None of type NoneType"),
    "draw nothing": (lambda c: c.plan.draw(None), "draw needs the name of a file or directory, not None"),
    "verify elsewhere": (lambda c: c.plan.verify(backend="mpi"), "unknown backend 'mpi'"),
    "verify another batch": (lambda c: c.plan.verify(batch={"x": IDS}), "the batch has .x.; this plan reads"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_careless_call_is_refused_in_a_short_message(name: str, context: Context) -> None:
    call, message = CALLS[name]
    before = {file.name: file.read_bytes() for file in context.folder.rglob("*") if file.is_file()}
    with pytest.raises(PlanError, match=message) as error:
        call(context)
    assert isinstance(error.value, InputError) or error.value.exit_code in (1, 2)
    assert len(str(error.value)) < 1500
    assert before == {file.name: file.read_bytes() for file in context.folder.rglob("*") if file.is_file()}
    # What was refused changed nothing: the step still trains.
    assert float(context.step(batch()).detach()) > 0
