"""Segments as torch.compile runs them: bytes beside those of Inductor's scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import superscaler as ss
from superscaler.ir.program import Backward, Forward
from superscaler.models import build
from superscaler.runtime.compiled import inductor
from superscaler.runtime.compiled import tape as compiled_tape
from superscaler.runtime.compiled.segments import CompiledSegments
from superscaler.runtime.saved_tensors import storage_of
from superscaler.runtime.step import Step
from superscaler.simulate import fusing
from superscaler.simulate.kernels import Works
from superscaler.simulate.rates import bytes_of
from superscaler.simulate.works import Kernel
from tests.helpers.ran import as_in, on_ranks

SIZES = "layers=1,hidden=256,heads=4,seq=128,batch=4,vocab=256"
GPT2, LLAMA = f"gpt2:{SIZES},dropout=0", f"llama:{SIZES},kv_heads=4,mlp=512"


def captured(spec: str, **way: Any) -> ss.Graph:
    model = build(spec)
    optimizer = torch.optim.SGD(model.module.parameters(), 0.1)
    return ss.capture(model.module, model.args, model.kwargs, optimizer, check=False, **way)


def kernels(plan: ss.Plan, is_compiled: bool) -> list[Kernel]:
    """Return the kernels of the distinct segments of device 0, forward and backward."""
    works, device = Works(plan.compiled.program, True, is_compiled), plan.compiled.program.devices[0]
    functions = works.segments.functions(device)
    pairs = zip(device.instructions[:], works.of(device), strict=True)
    found = {(type(i), functions[i.task]): some for i, some in pairs if isinstance(i, Forward | Backward)}
    return [kernel for some in found.values() for kernel in some]


def inductor_bytes(graph: torch.fx.GraphModule) -> int:
    """Return the bytes that the kernels of a graph move by the count of Inductor's scheduler."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    inputs = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    lowered = GraphLowering(graph, example_inputs=inputs)
    handlers = V.set_real_inputs(inputs), V.set_debug_handler(DebugContext()), V.set_graph_handler(lowered)
    with V.set_fake_mode(inputs[0].fake_mode), handlers[0], handlers[1], handlers[2]:
        lowered.run(*inputs)
        lowered.codegen()
        return lowered.count_bytes()[0]


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "autocast"), [(GPT2, None), (LLAMA, "bf16")])
def test_fused_kernels_move_the_bytes_that_inductor_counts(
    spec: str, autocast: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ss.compile(captured(spec, autocast=autocast), "single", "local:1")
    graphs, init = list[torch.fx.GraphModule](), fusing._Fused.__init__

    def noted(self: fusing._Fused, graph: torch.fx.GraphModule, recorder: Any) -> None:
        init(self, graph, recorder)
        graphs.append(graph)

    monkeypatch.setattr(fusing._Fused, "__init__", noted)
    found = kernels(plan, is_compiled=True)
    assert sum(map(bytes_of, found)) == pytest.approx(sum(map(inductor_bytes, graphs)), rel=0.04)
    assert sum(k.name == "fused" for k in found) < 40 < len(kernels(plan, is_compiled=False))


@pytest.mark.slow
def test_a_compiled_forward_keeps_what_torch_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured(LLAMA, autocast="bf16")
    plan = ss.compile(graph, "single", "local:1")
    works, device = Works(plan.compiled.program, True, True), plan.compiled.program.devices[0]
    forwards = [i for i in device.instructions[:] if isinstance(i, Forward)]
    rest, tasks = {w.name for w in device.weights}, works.segments.tasks(device)
    kept = 0
    for i in forwards:
        segment, names = tasks[i.task], (*i.inputs, *i.outputs)
        numbers = (*range(len(i.inputs)), *segment.results)
        own = {n for n, name in zip(numbers, names, strict=True) if name not in rest}
        kept += segment.tapes[0].bytes + sum(segment.sizes[n] for n in segment.tapes[0].held & own)

    saved, init = dict[int, int](), compiled_tape.CompiledTape.__init__

    def noted(tape: compiled_tape.CompiledTape, *given: Any) -> None:
        init(tape, *given)
        saved.update((storage_of(x), x.untyped_storage().nbytes()) for x in tape._kept if x is not None)

    def work(step: Step) -> None:
        step.state.compiled = CompiledSegments()
        step(as_in(plan.compiled, graph.captured.batch))
        for weight in step.state.weights.values():
            saved.pop(storage_of(weight), None)

    monkeypatch.setattr(inductor, "compiled", lambda graph, *_: inductor.plain(graph))
    monkeypatch.setattr(compiled_tape.CompiledTape, "__init__", noted)
    on_ranks(plan, work)
    assert kept == pytest.approx(sum(saved.values()), rel=0.02)


def test_products_and_attention_are_those_of_the_segment_and_the_rest_takes_less() -> None:
    plan = ss.compile(captured(LLAMA, precision="bf16"), "single", "h100:1x1")
    plain, compiled = plan.simulate(), plan.simulate(system=ss.System(torch_compile=True))
    assert compiled.step_seconds < plain.step_seconds
    assert compiled.fullest.memory["activations"] < plain.fullest.memory["activations"]
    own, fused = (kernels(plan, is_compiled) for is_compiled in (False, True))
    for name in ("mm", "_scaled_dot_product_flash_attention_for_cpu"):
        assert sum(k.name == name for k in fused) == sum(k.name == name for k in own) > 0
    assert not any(k.name.startswith(("pow", "rsqrt", "silu")) for k in fused)


@pytest.mark.slow
def test_dropout_is_drawn_by_the_kernels_that_read_it() -> None:
    plan = ss.compile(captured(f"gpt2:{SIZES},dropout=0.1"), "single", "h100:1x1")
    own, compiled = (words(kernels(plan, is_compiled)) for is_compiled in (False, True))
    assert own
    assert not compiled
    assert plan.simulate(system=ss.System(torch_compile=True)).step_seconds < plan.simulate().step_seconds


def words(some: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels that write int64 words in the shape of an activation."""
    return [k for k in some if any(kind == "int64" and len(shape) > 2 for shape, kind in k.outputs)]


@pytest.mark.slow
def test_halves_of_a_backward_have_the_kernels_of_the_whole() -> None:
    graph = captured(GPT2.replace("layers=1", "layers=2"))
    halved, whole = (ss.compile(graph, f"{p}:2,microbatches=2", "h100:1x2") for p in ("zb_h1", "pipeline_1f1b"))
    for rank in range(2):
        both = [backwards(plan, rank, is_compiled=True) for plan in (halved, whole)]
        assert both[0] == both[1]
        assert total(both[0]) < 0.95 * total(backwards(halved, rank, is_compiled=False))
    assert halved.simulate(system=ss.System(torch_compile=True)).step_seconds < halved.simulate().step_seconds


def backwards(plan: ss.Plan, rank: int, is_compiled: bool) -> Counter[Kernel]:
    """Return the kernels of all backwards of a device."""
    works, device = Works(plan.compiled.program, True, is_compiled), plan.compiled.program.devices[rank]
    pairs = zip(device.instructions[:], works.of(device), strict=True)
    return Counter(kernel for i, some in pairs if isinstance(i, Backward) for kernel in some)


def total(kernels: Counter[Kernel]) -> int:
    return sum(bytes_of(kernel) * count for kernel, count in kernels.items())
