"""Emitted code does what the instructions of its program say: both give the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import Any

import pytest
import torch
from torch import Tensor

import superscaler as ss
from superscaler.artifact import describe, initial_values
from superscaler.comm.threads import run_ranks
from superscaler.compiler import compile_graph
from superscaler.emit.segments import draws_of, emit_segments
from superscaler.ir import program as p
from superscaler.ir.program import ONE, Instruction, Program, Value
from superscaler.ops.table import PLACED, RANDOM, parts_of
from superscaler.plans import resolve
from superscaler.runtime import functional
from superscaler.runtime.executor import Rank, take
from superscaler.runtime.load import modules
from superscaler.runtime.step import Step, build_step
from tests.helpers.graphs import graph_of
from tests.helpers.sweeps import few

GPT = "gpt2:size=tiny"
DEEP = "gpt2:size=tiny,layers=4,batch=16"
MLP = "mlp:layers=4,hidden=8,inputs=4,classes=4,batch=64"
PLANS = [
    (GPT, "hybrid:dp=2,tp=2,pp=2,microbatches=4", 8),
    (GPT, "zero:stage=3,microbatches=2", 4),
    (GPT, "zb_h1:microbatches=8", 2),
    (GPT, "swap:what=both,microbatches=2", 2),
    ("llama:size=tiny", "ring_attention", 4),
    ("mixtral:size=tiny", "expert_parallel:capacity=1.25", 4),
    # Layers have weights of their own beside those in lists; values of one name end apart in microbatches.
    (DEEP, "co_shard:parts=2", 2),
    ("mixtral:size=tiny", "gradient_accumulation:microbatches=2", 2),
    # Their code has loops.
    (MLP, "pipeline_1f1b:microbatches=32", 2),
    (MLP, "interleaved:microbatches=32,chunks=2", 4),
    (MLP, "zbv:microbatches=32", 2),
    (MLP, "hybrid:dp=2,tp=1,pp=2,microbatches=32", 4),
    # Code of so few microbatches is compiled whole, and has loops, too.
    (MLP, "pipeline_1f1b:microbatches=8", 2),
    (MLP, "zero:stage=2,microbatches=8", 2),
    # Their warm-up and cool-down have loops, too.
    (MLP, "pipeline_1f1b:microbatches=32", 4),
    # Loops over layers.
    (DEEP, "tensor_parallel", 2),
    (DEEP, "sequence_parallel", 2),
    (DEEP, "zero:stage=3", 2),
    (DEEP, "recompute", 1),
    # Loops over the layers of a stage in one over microbatches.
    (DEEP, "pipeline_1f1b:microbatches=16", 2),
    # Loops over blocks inside a segment.
    ("gpt2:size=tiny,layers=4,dropout=0.1", "data_parallel", 2),
]


class Execution:
    """The values of a device while its instructions run, without emitted code but for that of segments."""

    def __init__(self, program: Program, rank: Rank, segments: Any, names: list[str]) -> None:
        self.program, self.rank, self.segments, self.names = program, rank, segments, names
        self.values: dict[Value, Any] = {ONE: rank.one}
        # The numbers of the gradients that the first half of a backward makes.
        self.first: dict[str, tuple[int, ...]] = {}

    def run(self, code: Iterable[Instruction]) -> Tensor:
        *instructions, end = code
        for i in instructions:
            self.step(i)
        assert isinstance(end, p.Loss)
        return self._with("counted", end.counted, lambda n: self.rank.loss(self.all(end.parts), n, end.of))

    def all(self, names: Iterable[Value | None]) -> list[Any]:
        return [None if name is None else self.values[name] for name in names]

    def _with(self, table: str, entry: Any, call: Callable[[int], Any]) -> Any:
        """Call with the number of an entry of a table."""
        self.rank.tables = {**self.rank.tables, table: [entry]}
        return call(0)

    def step(self, i: Instruction) -> None:
        values, rt = self.values, self.rank
        match i:
            case p.Load():
                is_input = self.program.model.tensors[i.tensor].kind == "input"
                read = rt.batch[i.tensor] if is_input else rt.weight(str(i.out))
                values[i.out] = take(read, rt.tables["slots"][i.tensor], i.box) if is_input else read
            case p.Forward():
                self._forward(i)
            case p.Backward():
                self._backward(i)
            case p.Slice():
                call = lambda n: rt.slice(values[i.source], i.view, n, i.shape)  # noqa: E731
                values[i.out] = self._with("boxes", i.ranges, call)
            case p.Combine() if not (i.pieces or i.largest):
                values[i.out] = rt.zeros(i.shape, i.dtype)
            case p.Combine():
                call = lambda n: rt.combine(self.all(i.pieces), n, i.view, i.shape, i.dtype, i.largest)  # noqa: E731
                values[i.out] = self._with("boxes", i.boxes, call)
            case p.Accumulate() if i.in_place and not i.largest:
                values[i.into] += values[i.value]
            case p.Accumulate():
                into, value = values[i.into], values[i.value]
                values[i.out] = into.maximum(value) if i.largest else into + value
            case p.Collective():
                self._with("groups", i.group, lambda n: self._collective(i, n))
            case p.Send():
                rt.communicator.send(values[i.source], i.peer, i.message, owned=True)
            case p.Recv():
                values[i.work] = rt.communicator.recv(i.shape, getattr(torch, i.dtype), i.peer, i.message)
            case p.Copy():
                values[i.work] = (rt.to_host if i.to_host else rt.to_device)(values[i.source])
            case p.Wait():
                values[i.out] = values.pop(i.work).wait().reshape(i.shape)
            case p.Update():
                if i.weights or not i.is_early:
                    rt.update(self.all(i.weights), self.all(i.gradients), early=i.is_early)
                if i.buffers:
                    rt.write(self.all(i.buffers), self.all(i.values))
            case p.Give():
                rt.give(i.tensor, values[i.value], i.shape)
            case p.Free():
                for name in i.names:
                    del values[name]

    def _forward(self, i: p.Forward) -> None:
        function, rt = self.program.functions[i.function], self.rank
        draws = draws_of(self.program.model, function, function.boxes_at(i.at, RANDOM))
        placed = zip((op for op in function.ops if op.target in PLACED), function.boxes_at(i.at, PLACED), strict=True)
        parts = [part for op, box in placed for part in parts_of(op, box, self.program.model.tensors).values()]

        def random(k: int) -> Tensor:
            d = draws[k]
            drawn = functional.draw(rt.seed, rt.steps + d.ahead, d.op, d.box, d.extents, rt.device)
            return drawn.reshape(d.shape)

        extra = ({"random": random} if draws else {}) | ({"parts": parts} if parts else {})
        body = getattr(self.segments, self.names[i.function])
        run = update_wrapper(lambda *given: body(*given, **extra), body)
        run.__dict__.update(constant={*range(len(i.inputs))} - {*function.grads}, saved=function.saved)
        made = rt.forward(str(i.task), run, self.all(i.inputs), bool(function.grads))
        self.values.update(zip(i.outputs, made, strict=True))

    def _backward(self, i: p.Backward) -> None:
        rt, given, tag = self.rank, self.all(i.gradients), str(i.task)
        pairs = [*zip(i.outputs, i.sums or (None,) * len(i.outputs), strict=True)]
        first = self.first.get(tag, ())
        if i.half == "input":
            first = self.first[tag] = tuple(n for n, pair in enumerate(pairs) if pair != (None, None))
        pairs = [pair for n, pair in enumerate(pairs) if not i.half or (n in first) == (i.half == "input")]
        into = {n: [self.values.get(total)] for n, (_, total) in enumerate(pairs) if total is not None}
        if not i.half:
            made = rt.backward(tag, given, self.all(i.again), into)
        elif i.half == "input":
            made = rt.backward_input(tag, given, first)
        else:
            made = rt.backward_weight(tag, into)
        names = [out for out, total in pairs if total is None]
        self.values.update((name, x) for name, x in zip(names, made, strict=True) if name is not None)
        self.values.update((total, into[n][0]) for n, (_, total) in enumerate(pairs) if total is not None)

    def _collective(self, i: p.Collective, group: int) -> None:
        is_flat = i.kind in ("all_reduce", "broadcast", "reduce")
        pairs = zip(self.all(i.sources), i.ways, strict=True)
        given = [x if x is None or is_flat else x.reshape(way.view) for x, way in pairs]
        call = getattr(self.rank, i.kind + "_bucket" * (len(given) > 1))
        if len(given) > 1:
            dims, sizes = [max(way.gather_slot, way.scatter_slot) for way in i.ways], [way.sizes for way in i.ways]
            other = {"dims": dims, "sizes": sizes if any(sizes) else ()}
            options = {"all_reduce": {"largest": i.largest}, "reduce": {"root": i.root}}.get(i.kind, other)
            works = call(given, group, **options)
        else:
            (way,) = i.ways
            options = {
                "all_reduce": (), "reduce": (i.root,), "rd_gather": (i.root, way.gather_slot),
                "all_gather": (way.gather_slot, way.sizes), "reduce_scatter": (way.scatter_slot, way.sizes),
                "all_to_all": (way.scatter_slot, way.gather_slot), "broadcast": (way.shape, i.dtype),
            }  # fmt: skip
            largest = {"largest": i.largest} if i.kind == "all_reduce" else {}
            works = (call(given[0], group, *options[i.kind], **largest),)
        self.values.update((name, work) for name, work in zip(i.works, works, strict=True) if name is not None)


# The others reach no other branch of the code that is emitted.
@pytest.mark.parametrize(("model", "plan", "devices"), few(PLANS, 5, 9, 12, 13, 17, 18))
def test_instructions_and_their_code_give_the_same_bits(
    model: str, plan: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(model)
    compiled = compile_graph(graph, resolve(plan), ss.Cluster.local(devices))
    values = initial_values(graph.model, graph.captured.values)
    described, code = json.loads(json.dumps(describe(compiled))), modules(compiled.emitted.files)
    # Without loops inside: each block is written in full.
    monkeypatch.setattr("superscaler.emit.blocks._candidates", lambda *_: ())
    text, names = emit_segments(compiled.program)
    segments = modules({"segments.py": text})["segments"]
    if plan == "data_parallel":
        assert len(text) > 2 * len(compiled.emitted.files["segments.py"])

    def found(step: Step, losses: list[Tensor]) -> list[Tensor]:
        return [*losses, *(step.state.weights[name].detach() for name in sorted(step.state.weights))]

    def emitted(communicator: Any) -> list[Tensor]:
        step = build_step(described, code, values, communicator)
        return found(step, [step(graph.captured.batch) for _ in range(2)])

    def executed(communicator: Any) -> list[Tensor]:
        step = build_step(described, code, values, communicator)
        step.state.batch = graph.captured.batch
        instructions = compiled.program.devices[communicator.rank].instructions
        runs = (Execution(compiled.program, step.state, segments, names) for _ in range(2))
        return found(step, [run.run(instructions) for run in runs])

    for one, other in zip(run_ranks(devices, emitted), run_ranks(devices, executed), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
