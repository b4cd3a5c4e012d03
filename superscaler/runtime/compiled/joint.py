"""The graphs of a segment: its forward and its backward, traced together and cut by torch's own partitioner.

They are traced on fake tensors, so that nothing runs and no memory is taken. Their operators are Inductor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from superscaler.runtime.functions.tracing import traced

Run = Callable[..., Sequence[Tensor]]
# In the names of inputs of graphs, as the partitioner tells gradients from other tensors.
_GRADIENT = "tangents"


@dataclass(frozen=True, eq=False)
class Joint:
    """The two graphs of a segment.

    `forward` takes the inputs, and returns the outputs and then what else is kept. `kept`: what `backward` reads, as
    numbers in the list of all inputs and all results of the forward. Then it reads the gradients of the outputs in
    `ends`. It returns the gradient of each input that wants one, None where nothing arrives.
    """

    mode: FakeTensorMode
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    outputs: int
    ends: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def gradients(self) -> list[fx.Node]:
        """The inputs of the backward that are gradients of outputs."""
        return [] if self.backward is None else [n for n in inputs_of(self.backward) if is_gradient(n)]


def trace(
    run: Run, inputs: Sequence[Tensor], wants: Sequence[bool], saved: Sequence[int] | None, resident: Iterable[int] = ()
) -> Joint:
    """Return the graphs of a segment on inputs of these shapes.

    `wants`: the inputs that want a gradient, none for a forward without a backward. `saved`: the outputs whose
    gradients a backward gets (None: all). `resident`: inputs whose memory a backward has anyway.
    """
    with _tracing() as mode:
        primals = [like(x).requires_grad_(wanted) for x, wanted in zip(inputs, wants, strict=True)]
        if not any(wants):
            with torch.no_grad():
                return _forward_only(mode, _graph(lambda given, _: list(run(*given)), primals, []))
        with torch.enable_grad():
            outputs = list(run(*primals))
        numbers = range(len(outputs)) if saved is None else saved
        ends = tuple(k for k in numbers if outputs[k].requires_grad)
        gradients = [like(outputs[k]) for k in ends]
        graph = _graph(lambda given, tangents: _both(run, given, tangents, ends), primals, gradients)
        return _cut(mode, graph, [*primals, *gradients], len(outputs), ends, list(resident))


@contextmanager
def _tracing() -> Iterator[FakeTensorMode]:
    """Yield the mode in which a segment is traced: shapes are numbers, and no operator gives a shape by its data."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils._python_dispatch import _disable_current_modes

    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    with _disable_current_modes(), FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True) as mode, traced():
        yield mode


def like(x: Tensor) -> Tensor:
    """Return a tensor of the shape, strides, dtype and device of another."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _both(run: Run, primals: Sequence[Tensor], tangents: Sequence[Tensor], ends: Sequence[int]) -> list[Tensor | None]:
    with torch.enable_grad():
        outputs = list(run(*primals))
        wanted = [x for x in primals if x.requires_grad]
        if not ends:
            return [*outputs, *(None for _ in wanted)]
        found = torch.autograd.grad([outputs[k] for k in ends], wanted, tangents, allow_unused=True)
    return [*outputs, *found]


def _graph(
    function: Callable[[list[Tensor], list[Tensor]], list[Tensor | None]], primals: list[Tensor], tangents: list[Tensor]
) -> fx.GraphModule:
    """Return the graph of a function of two lists of tensors, without changes in place, in Inductor's operators."""
    from torch._functorch._aot_autograd.functional_utils import from_fun, has_data_mutation, to_fun
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    # Functions that change tensors in place are traced by Python's functionalization, not by that of C++.
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)

    def functional(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor | None]:
        with torch._C._ExcludeDispatchKeyGuard(keys), FunctionalTensorMode():
            own, ends = list(map(to_fun, primals)), list(map(to_fun, tangents))
            found: list[Any] = [x if x is None else from_fun(x) for x in function(own, ends)]
            if any(map(has_data_mutation, [*own, *ends])):
                raise NotImplementedError("it changes an input in place")
        return found

    graph = make_fx(functional, decomposition_table=select_decomp_table())(primals, tangents)
    # Its inputs are a list, not two.
    graph.graph.set_codegen(fx.graph.CodeGen())
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _forward_only(mode: FakeTensorMode, graph: fx.GraphModule) -> Joint:
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    with inductor_context(mode):
        graph = joint_graph_passes(graph)
    return Joint(mode, graph, None, len(results_of(graph)), (), ())


def _cut(
    mode: FakeTensorMode, graph: fx.GraphModule, given: Sequence[Tensor], outputs: int, ends: tuple[int, ...],
    resident: list[int],
) -> Joint:  # fmt: skip
    """Return the two halves of a graph. What the forward has anyway, inputs and outputs, is not returned twice."""
    from torch._inductor.compile_fx import partition_fn

    with inductor_context(mode):
        forward, backward = partition_fn(graph, given, num_fwd_outputs=outputs, static_lifetime_input_indices=resident)
    inputs = inputs_of(forward)
    results = results_of(forward)
    own = list(dict.fromkeys(n for n in results[outputs:] if n not in inputs and n not in results[:outputs]))
    # An output may be an input, or the same as another.
    number = {n.name: k for k, n in reversed(list(enumerate([*inputs, *results[:outputs], *own])))}
    set_results(forward, [*results[:outputs], *own])
    read = [n.name for n in inputs_of(backward) if not is_gradient(n)]
    return Joint(mode, forward, backward, outputs, ends, tuple(number[name] for name in read))


@contextmanager
def inductor_context(mode: FakeTensorMode) -> Iterator[None]:
    from torch._guards import TracingContext, tracing
    from torch._inductor.virtualized import V

    with tracing(TracingContext(mode)), V.set_fake_mode(mode):
        yield


def is_gradient(n: fx.Node) -> bool:
    """Return whether an input of a backward is the gradient of an output."""
    return _GRADIENT in str(n.target)


def inputs_of(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the inputs of a graph in order."""
    return [n for n in graph.graph.nodes if n.op == "placeholder"]


def results_of(graph: fx.GraphModule) -> list[Any]:
    return list(graph.graph.output_node().args[0])  # type: ignore[arg-type]


def set_results(graph: fx.GraphModule, results: Sequence[Any]) -> None:
    """Make a graph return other nodes of it."""
    graph.graph.output_node().args = (tuple(results),)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def reshape_views(graph: fx.GraphModule) -> None:
    """Let a graph run operator by operator on tensors of other strides than those it was traced with: a gradient may
    have any.
    """
    for target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        for n in graph.graph.find_nodes(op="call_function", target=target):
            n.target = torch.ops.aten.reshape.default
    graph.recompile()
