"""Parts of the graph of a backward: without some gradients of outputs, with sums of gradients, and its two halves."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, fx

from superscaler.runtime.compiled.joint import inputs_of, is_gradient, results_of, set_results

# The gradient of each input; None: nothing arrives.
Results = Sequence[fx.Node | None]
# Two graphs, and what the second reads.
Halves = tuple[fx.GraphModule, fx.GraphModule, tuple[int, ...]]


def part(graph: fx.GraphModule, inputs: Sequence[fx.Node], results: Results) -> fx.GraphModule:
    """Return the graph from some nodes, which become its inputs, to some others."""
    made, copy = fx.Graph(), dict[fx.Node, fx.Node]()
    for n in inputs:
        copy[n] = made.placeholder(n.name)
    needed = before(results, inputs)
    for n in graph.graph.nodes:
        if n in needed and n not in copy:
            copy[n] = made.node_copy(n, copy.__getitem__)
    for n, own in copy.items():
        own.meta = {"val": n.meta["val"]} if "val" in n.meta else {}
    made.output(tuple(None if n is None else copy[n] for n in results))
    return fx.GraphModule(graph, made)


def before(results: Results, ends: Iterable[fx.Node] = ()) -> set[fx.Node]:
    """Return the nodes that some results need, up to the `ends`."""
    found, stack, known = set[fx.Node](), [n for n in results if n is not None], set(ends)
    while stack:
        n = stack.pop()
        if n not in found:
            found.add(n)
            stack += [] if n in known else n.all_input_nodes
    return found


def without_gradients(graph: fx.GraphModule, missing: Sequence[bool]) -> fx.GraphModule:
    """Return a backward without some of its gradients of outputs, those that do not arrive.

    A backward is linear in these. What depends on missing ones only is zero: it is not computed, and as a result it
    does not arrive either. Zeros that are added to a tensor are left out, others are constants.
    """
    made = part(graph, inputs_of(graph), results_of(graph))
    ends = [n for n in inputs_of(made) if is_gradient(n)]
    absent = {n for n, is_missing in zip(ends, missing, strict=True) if is_missing}
    zeros, some = set(absent), set(ends) - absent
    for n in made.graph.nodes:
        if some.isdisjoint(n.all_input_nodes):
            zeros |= {n} if _is_zero(n, zeros) else set()
        elif n.op != "output":
            some.add(n)
            if (left := _addend(n, zeros)) is not None:
                n.replace_all_uses_with(left)
    # It drops what only zeros read.
    set_results(made, [None if n in zeros else n for n in results_of(made)])
    for n in [n for n in made.graph.nodes if n in zeros and n.users]:
        with made.graph.inserting_after(inputs_of(made)[-1]):
            n.replace_all_uses_with(_constant_zeros(made.graph, n))
    made.graph.eliminate_dead_code()
    for n in absent:
        made.graph.erase_node(n)
    made.recompile()
    return made


def _is_zero(n: fx.Node, zeros: set[fx.Node]) -> bool:
    """Return whether a node that depends on no gradient that arrives is a linear function of zeros."""
    val = n.meta.get("val")
    vals = [x for x in (val if isinstance(val, (tuple, list)) else [val]) if x is not None]
    are_numbers = all(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in vals)
    is_made_alike = str(n.target).partition(".default")[0].endswith("_like") or ".new_" in str(n.target)
    return n.op == "call_function" and are_numbers and not is_made_alike and not zeros.isdisjoint(n.all_input_nodes)


def _addend(n: fx.Node, zeros: set[fx.Node]) -> fx.Node | None:
    """Return the addend that a sum with zeros is equal to, if there is one."""
    if n.target is torch.ops.aten.add.Tensor and all(isinstance(x, fx.Node) for x in n.args):
        left = [x for x in n.all_input_nodes if x not in zeros]
        val = n.meta["val"]
        if len(left) == 1 and (left[0].meta["val"].shape, left[0].meta["val"].dtype) == (val.shape, val.dtype):
            return left[0] if left[0] is n.args[0] or not n.kwargs else None
    return None


def _constant_zeros(graph: fx.Graph, n: fx.Node) -> fx.Node:
    val = n.meta["val"]
    options = {"dtype": val.dtype, "device": val.device}
    made = graph.call_function(torch.ops.aten.full.default, (list(val.shape), 0), options)
    made.meta = {"val": val}
    return made


def without_constants(graph: fx.GraphModule) -> tuple[fx.GraphModule, dict[int, Tensor]]:
    """Return a graph without the results that depend on no input, and these by number. An unread result is such a one:
    zeros, without memory.
    """
    inputs, results = inputs_of(graph), results_of(graph)
    fixed = {k: n for k, n in enumerate(results) if before([n]).isdisjoint(inputs)}
    if not fixed:
        return graph, {}
    found = part(graph, [], list(fixed.values()))()
    left = [n for k, n in enumerate(results) if k not in fixed]
    return part(graph, inputs, left), dict(zip(fixed, found, strict=True))


def with_sums(graph: fx.GraphModule, added: Sequence[int]) -> fx.GraphModule:
    """Return a graph some of whose results are added to further inputs, one for each.

    On CPUs an addition is part of what makes its result, and the sum before ends there. On GPUs all are one operator on
    lists, as few kernels.
    """
    if not added:
        return graph
    made = part(graph, inputs_of(graph), results_of(graph))
    nodes, last, sums = results_of(made), inputs_of(made)[-1], list[fx.Node]()
    for k in added:
        with made.graph.inserting_after(last):
            last = made.graph.placeholder(f"total_of_gradient_{k}")
        sums.append(last)
    output, terms = made.graph.output_node(), [nodes[k] for k in added]
    with made.graph.inserting_before(output):
        if any(n.meta["val"].is_cuda for n in terms):
            both = made.graph.call_function(torch.ops.aten._foreach_add.List, (sums, terms))
            totals = [made.graph.call_function(operator.getitem, (both, n)) for n in range(len(sums))]
        else:
            add = torch.ops.aten.add.Tensor
            totals = [made.graph.call_function(add, pair) for pair in zip(sums, terms, strict=True)]
    for k, total in zip(added, totals, strict=True):
        nodes[k] = total
    output.args = (tuple(nodes),)
    made.recompile()
    return made


def halves(graph: fx.GraphModule, first: Sequence[int]) -> Halves:
    """Return a backward as two graphs: the gradients with these numbers, then the others; and what the second reads, as
    numbers in the list of the inputs and the results (but None) of the first.

    Where the gradients of vectors (the weight and bias of a norm) branch off, they are made in the first half: the
    second would need an activation and its gradient for a few numbers.
    """
    inputs, results = inputs_of(graph), results_of(graph)
    own, others = [results[k] for k in first], [n for k, n in enumerate(results) if k not in first]
    now = before([*own, *(n for n in others if n is not None and n.meta["val"].dim() < 2)]).union(inputs)
    late = before(others, now) - now
    read = {n for n in others if n in now}.union(x for n in late for x in n.all_input_nodes if x in now)
    kept = [n for n in graph.graph.nodes if n in read]
    extra = [n for n in kept if n not in inputs and n not in own]
    found = [*inputs, *(n for n in own if n is not None), *extra]
    number = {n: k for k, n in reversed(list(enumerate(found)))}
    return part(graph, inputs, [*own, *extra]), part(graph, kept, others), tuple(number[n] for n in kept)
