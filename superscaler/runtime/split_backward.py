"""A backward in two halves: the gradients of some leaves first, those of the others on demand.

The first half walks the autograd graph to its leaves once. If a node on the way also leads to other leaves, its
incoming gradient is kept; the second half continues from there, to the other leaves only.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from superscaler.runtime.saved_tensors import kept_by

# Edges at which gradients enter, and these gradients.
Given = Sequence[tuple[GradientEdge, Tensor]]
# Per leaf; None: nothing arrives.
Gradients = Sequence[Tensor | None]
# Nodes, each after its next nodes: node -> pairs (next node, index of the gradient there).
Nodes = Mapping[Node, Sequence[tuple[Node, int]]]


@dataclass(frozen=True)
class Rest:
    """The state of the second half: gradients made already, by the number of the leaf, and the edges to continue from.

    `roots` own the graph, which nodes written in Python do not.
    """

    roots: Sequence[GradientEdge]
    ends: Sequence[GradientEdge]
    found: dict[int, Tensor | None]
    left: list[tuple[list[tuple[GradientEdge, Tensor]], Iterable[int]]]


def grad(given: Given, ends: Sequence[GradientEdge], keep: bool = False) -> Gradients:
    """Return the gradients at some ends, None for an end that gets none; `keep` the graph to walk it again."""
    if not given or not ends:
        return [None] * len(ends)
    edges, gradients = zip(*given, strict=True)
    return torch.autograd.grad(edges, ends, gradients, retain_graph=keep, allow_unused=True)


def first_half(given: Given, leaves: Sequence[Tensor], is_first: Sequence[bool]) -> tuple[Gradients, Rest]:
    """Return the gradients of the first leaves (None for others), and the state of the second half.

    If several nodes on the way lead to another leaf (a weight that is used twice), its gradient is made here, because
    one of its uses may be behind the other. Where only vectors branch off (the weight and bias of a norm), their
    gradients are made here, too: the second half would need an activation and its gradient for a few numbers. Tensors
    that the forward saved for this half alone are freed as they are read.
    """
    ends, roots = [get_gradient_edge(leaf) for leaf in leaves], [edge for edge, _ in given]
    nodes = nodes_from(edge.node for edge in roots)
    is_passed, own = _ways(nodes, {end.node: n for n, end in enumerate(ends)}, is_first)
    sources = [node for node in nodes if own[node] and (is_passed[node] or any(node is edge.node for edge in roots))]
    times = Counter(n for node in sources for n in own[node])
    small = {n for node in sources if all(leaves[n].dim() < 2 for n in own[node]) for n in own[node]}
    now = [n for n, first in enumerate(is_first) if first or times[n] > 1 or n in small]
    left = {
        node: (list[tuple[GradientEdge, Tensor]](), some) for node in sources if (some := own[node].difference(now))
    }
    coming = [(edge.node, edge.output_nr) for edge in roots] + [edge for edges in nodes.values() for edge in edges]
    kept = [GradientEdge(node, k) for node, k in dict.fromkeys(coming) if node in left]
    saved = list(kept_by(node for node in nodes if is_passed[node] and node not in left))
    for node, one in saved:
        # A node written in Python may read it any number of times.
        one.once = not isinstance(node, torch.autograd.function.BackwardCFunction)
    made = grad(given, [*(ends[n] for n in now), *kept], keep=True)
    for _, one in saved:
        one.x = None
    for edge, gradient in zip(kept, made[len(now) :], strict=True):
        left[edge.node][0].extend([] if gradient is None else [(edge, gradient)])
    found = dict(zip(now, made, strict=False))
    first = [found.pop(n) if is_one else None for n, is_one in enumerate(is_first)]
    return first, Rest(roots, ends, found, list(left.values()))


def second_half(rest: Rest) -> Gradients:
    """Return the gradients of the other leaves (None for the first), and free the kept tensors."""
    while rest.left:
        given, own = rest.left.pop()
        rest.found.update(zip(own, grad(given, [rest.ends[n] for n in own]), strict=True))
    return [rest.found.get(n) for n in range(len(rest.ends))]


def nodes_from(starts: Iterable[Node]) -> Nodes:
    """Return all nodes that some lead to."""
    found, opened, stack = dict[Node, list[tuple[Node, int]]](), dict[Node, list[tuple[Node, int]]](), list(starts)
    while stack:
        node = stack[-1]
        if node in opened:
            found[stack.pop()] = opened[node]
            continue
        opened[node] = [(after, k) for after, k in node.next_functions if after is not None]
        stack += [after for after, _ in opened[node] if after not in opened]
    return found


def _ways(
    nodes: Nodes, number: Mapping[Node, int], is_first: Sequence[bool]
) -> tuple[dict[Node, bool], dict[Node, set[int]]]:
    """Return for each node whether it leads to first leaves, and the other leaves that only it leads to."""
    is_passed, own = dict[Node, bool](), dict[Node, set[int]]()
    for node, edges in nodes.items():
        n = number.get(node, -1)
        is_passed[node] = is_first[n] if n >= 0 else any(is_passed[after] for after, _ in edges)
        reached = set[int]().union(*(own[after] for after, _ in edges if not is_passed[after]))
        own[node] = {n} if n >= 0 and not is_first[n] else reached
    return is_passed, own
