"""Two eager steps of the user's module compared with the exported graph at capture, in the trained dtypes.

torch.export runs the Python of a forward once, and freezes the state that it read: an iterator, a counter, a class
attribute, the time. A copy of the module is trained by torch's own optimizer. Each step of the graph starts from the
current weights and buffers of the copy, so that rounding never adds up. Dropout keeps everything.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from superscaler.errors import CaptureError, brief
from superscaler.frontend.base.captured import Captured
from superscaler.frontend.base.checkpoints import marked
from superscaler.frontend.base.oracle import (
    Reference,
    dense,
    gaps,
    largest,
    largest_gap,
    packed,
    reference_step,
    values_of,
)
from superscaler.frontend.base.refusals import forward_line
from superscaler.frontend.base.results import form_and_tensors, loss_of
from superscaler.frontend.base.trace import source_of
from superscaler.frontend.base.training import Optimizers, optimizers_of
from superscaler.frontend.effects.untouched import untouched

STEPS = 2
# A model above these limits is not compared: elements of its parameters, FLOPs of a step on CPU and on GPU.
MOST_ELEMENTS, MOST_FLOPS, MOST_FLOPS_GPU = 5 * 10**7, 10**10, 5 * 10**12
# A larger difference, relative to the largest element, is compared with rounding noise. By the lowest dtype of a graph.
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
# Allowed beyond that: this many times the change of the graph's own results when its weights and inputs are perturbed.
_NOISE = 3.0
# Errors of gradients are relative to at least this fraction of the model's largest gradient element.
_FLOOR = 1e-2
_DROPOUT = re.compile("dropout([123]d)?$")
# Functions with a dropout inside -> position and name of the argument that is its probability.
_INNER = {F.scaled_dot_product_attention: (4, "dropout_p"), F.multi_head_attention_forward: (10, "dropout_p")}
# The errors of kernels for an index out of range, and torch's note of the node that was running.
_BEYOND, _RUNNING = re.compile("out of (bounds|range)|Class values must be"), re.compile(r"While executing %(\w+)")
_STATE = (
    "something that the forward reads changes between its calls, and the graph has what it was at capture: an "
    "iterator, a counter, a default argument, the time; pass it in as an input, or make it a buffer"
)
# The kind of tensor that differs first -> likely causes.
_CAUSES = {
    "loss": _STATE,
    "output": _STATE,
    "gradient": "gradients are made by other means than the operators of the forward, or " + _STATE,
    "buffer": "it is changed by other means than torch's operators, or " + _STATE,
}
# The start of the line for a module that is not compared.
SKIPPED = "not compared with the module"


class Unchecked(Exception):
    """The reason why a module is not compared, in a few words."""


class Found(NamedTuple):
    """The results of a step, by kind and name, and the states of the random generators after it."""

    tensors: dict[tuple[str, str], Tensor]
    draws: list[Tensor]


def agree(captured: Captured, optimizer: Optimizers | None) -> str:
    """Return one line: the largest difference between two steps of the module and of the graph, or the reason why they
    are not compared.

    Raises CaptureError for a difference larger than rounding. The module, the optimizer and the random generators are
    left unchanged.
    """
    try:
        _require_small(captured)
        with untouched(captured.call.module, optimizer, captured.call.args, captured.call.kwargs):
            largest = _compared(captured, optimizer)
    except Unchecked as why:
        return f"{SKIPPED}: {why}"
    return f"{STEPS} steps are those of the module; the largest difference is {largest:.1e}"


def _require_small(captured: Captured) -> None:
    model, module = captured.model, captured.call.module
    if any(x.is_meta for x in (*module.parameters(), *module.buffers(), *captured.batch.values())):
        raise Unchecked("it has no data (it was built on the meta device)")
    elements, flops = sum(prod(t.shape) for t in model.parameters()), sum(op.flops for op in model.ops)
    most = MOST_FLOPS_GPU if any(p.is_cuda for p in module.parameters()) else MOST_FLOPS
    if elements > MOST_ELEMENTS or flops > most:
        raise Unchecked(
            f"its {elements:,} elements and {flops:.2g} FLOPs are too many (above {MOST_ELEMENTS:,} or {most:.2g}); "
            "`superscaler verify` compares them"
        )


def _compared(captured: Captured, optimizer: Optimizers | None) -> float:
    """Return the largest relative difference of all steps."""
    call, original = captured.call, {id(p) for p in captured.call.module.parameters()}
    with _unchecked("it cannot be copied"):
        module, optimizer, args, kwargs = copy.deepcopy((call.module, optimizer, call.args, call.kwargs))
    largest = 0.0
    for step in range(1, STEPS + 1):
        values = {**captured.values, **values_of(module, captured.model)}
        values = {name: value.clone() for name, value in values.items()}
        graph = _seeded(step, partial(_graph_step, captured, values))
        eager = _seeded(step, partial(_eager_step, captured, module, args, kwargs, original))
        largest = max(largest, _difference(captured, graph, eager, values, step))
        for _, one in optimizers_of(optimizer):
            one.step()
    return largest


def _seeded(seed: int, run: Callable[[], Reference]) -> Found:
    torch.manual_seed(seed)
    found = run().tensors()
    states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()
    return Found(found, [torch.get_rng_state(), *states])


def _graph_step(captured: Captured, values: Mapping[str, Tensor]) -> Reference:
    try:
        made = reference_step(captured, captured.batch, values)
    except (IndexError, RuntimeError) as error:
        raise CaptureError(_failure(captured, error)) from None
    gradients = {n: dense(g, values[n]) for n, g in made.gradients.items()}
    pieces = {n: torch.zeros_like(values[n]) for n in captured.model.segments} | gradients
    return made._replace(gradients={**gradients, **packed(captured.model, pieces)})


def _failure(captured: Captured, error: Exception) -> str:
    """Return the message for an example batch that cannot run, as one with an index out of range: the line, and the
    integer inputs that it reads.
    """
    running, nodes = _RUNNING.search(str(error)), {node.name: node for node in captured.exported.graph.nodes}
    node = nodes[running[1]] if running else None
    found, todo = dict[str, Tensor](), [node] if node else []
    while todo:
        for read in todo.pop().all_input_nodes:
            value = read.meta.get("val")
            if isinstance(value, Tensor) and not value.is_floating_point():
                found |= {read.name: captured.batch[read.name]} if read.name in captured.batch else {}
                todo.append(read)
    inputs = ", ".join(f"{name} has {x.min()} to {x.max()}" for name, x in found.items() if x.numel())
    where, is_beyond = source_of(node) if node else "", _BEYOND.search(str(error))
    return (
        f"{where or forward_line(captured.call.module)} does not run on the example batch: {brief(error).rstrip('.')}"
        f"{f' (input {inputs})' if inputs else ''}; capture with a batch "
        f"{'whose indices are in range' if is_beyond else 'on which the module runs'}."
    )


def _eager_step(captured: Captured, module: nn.Module, args: Any, kwargs: Any, original: set[int]) -> Reference:
    """Run a step of the copy, up to the update of its weights."""
    call, name = captured.call, type(module).__name__
    kind, dtype = call.autocast or (next((p.device.type for p in module.parameters()), "cpu"), None)
    module.zero_grad()
    # An enclosing autocast region would return cached casts of weights that have changed since.
    torch.clear_autocast_cache()
    autocast = torch.autocast(kind, dtype, dtype is not None)
    with _unchecked("it does not run"), WithoutDropout(), marked(), torch.enable_grad(), autocast:
        output = module(*args, **kwargs)
    with _unchecked("it does not run", CaptureError):
        loss = loss_of(output, name, call.losses) if captured.model.loss else None
        kept = form_and_tensors(output, name, loss)[1] if captured.model.result else {}
    if loss is not None:
        if any(id(x) in original for x in _leaves(loss)):
            raise Unchecked("its copy reads the parameters of the module itself, which a function in it holds")
        with _unchecked("it does not run"):
            _backward(module, loss, kept, call.loss_of)
    outputs = {n: x.detach() for n, x in kept.items()}
    gradients: dict[str, Tensor | None] = {n: dense(p.grad, p.detach()) for n, p in module.named_parameters()}
    buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
    return Reference(None if loss is None else loss.detach(), gradients, buffers, outputs)


@contextmanager
def _unchecked(why: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Turn an error of a module's code, which may raise any exception, into Unchecked."""
    try:
        yield
    except kind as error:
        raise Unchecked(f"{why} ({type(error).__name__}: {brief(error)})") from error


def _backward(module: nn.Module, loss: Tensor, outputs: Mapping[str, Tensor], loss_of: Mapping[str, str]) -> None:
    """Run the backward of the loss, or that of each of several losses to its own parameters."""
    if not loss_of:
        loss.backward()
    for name in dict.fromkeys(loss_of.values()):
        own = [p for n, p in module.named_parameters() if loss_of.get(n) == name]
        outputs[name].backward(retain_graph=True, inputs=own)


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors whose gradients a backward accumulates."""
    todo, seen = [loss.grad_fn], set[Any]()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
            if (leaf := getattr(node, "variable", None)) is not None:
                yield leaf


def _difference(captured: Captured, graph: Found, eager: Found, values: dict[str, Tensor], step: int) -> float:
    """Return the largest relative difference of one step. Raises CaptureError for one that is too large."""
    close = _CLOSE[_lowest(captured)]
    expected = {**{("buffer", n): values[n] for n in values}, **graph.tensors}
    pairs = {key: (have, eager.tensors[key]) for key, have in expected.items() if key in eager.tensors}
    floor = _FLOOR * max((largest(g) for (kind, _), g in graph.tensors.items() if kind == "gradient"), default=0.0)
    sizes = {key: max(largest(want), floor * (key[0] == "gradient")) for key, (_, want) in pairs.items()}
    found = {key: largest_gap(*pair) for key, pair in pairs.items()}
    far = [key for key, gap in found.items() if gap > close * sizes[key]]
    noise = _noise(captured, graph, values, step) if far else {}
    far = [key for key in far if found[key] > close * sizes[key] + _NOISE * noise.get(key, 0.0)]
    if far and any(not torch.equal(a, b) for a, b in zip(graph.draws, eager.draws, strict=True)):
        raise Unchecked("its random numbers do not come in the order of the captured ones")
    if far:
        order = [key for kind in _CAUSES for key in far if key[0] == kind]
        raise CaptureError(_message(captured, order[0], *pairs[order[0]], step))
    return max((gap / max(sizes[key], 1e-30) for key, gap in found.items() if sizes[key]), default=0.0)


def _message(captured: Captured, key: tuple[str, str], graph: Tensor, eager: Tensor, step: int) -> str:
    (kind, name), at, numbers = key, "", "has another shape"
    if graph.shape == eager.shape:
        gap = gaps(graph, eager)
        index = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape)) if gap.dim() else ()
        at = str(list(index)) if index else ""
        numbers = f"is {eager[index].item():.7g} in the module and {graph[index].item():.7g} in the captured graph"
    return (
        f"{forward_line(captured.call.module)} does in step {step} what the captured graph does not: "
        f"the {' '.join(filter(None, (kind, name.removeprefix('return.'))))}{at} {numbers}. Likely {_CAUSES[kind]}. "
        "check=False (--no-check) captures it as it is."
    )


def _noise(captured: Captured, graph: Found, values: dict[str, Tensor], step: int) -> dict[tuple[str, str], float]:
    """Return the changes of the results when weights are perturbed by one rounding error of the lowest dtype."""
    size, found = torch.finfo(_lowest(captured)).eps, dict.fromkeys(graph.tensors, 0.0)
    generator = torch.Generator().manual_seed(0)

    def moved(x: Tensor) -> Tensor:
        sign = torch.randint(0, 2, x.shape, generator=generator).to(x.device) * 2 - 1
        return (x * (1 + size * sign.double())).to(x.dtype) if x.is_floating_point() else x

    for _ in range(2):
        near = {name: moved(x) for name, x in values.items()}
        others = _seeded(step, partial(_graph_step, captured, near)).tensors
        found = {key: max(gap, largest_gap(others[key], graph.tensors[key])) for key, gap in found.items()}
    return found


def _lowest(captured: Captured) -> torch.dtype:
    """Return the floating dtype with the fewest digits in a graph."""
    values = (node.meta.get("val") for node in captured.exported.graph.nodes)
    dtypes = {x.dtype for x in values if isinstance(x, Tensor) and x.dtype in _CLOSE}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


class WithoutDropout(TorchFunctionMode):
    """A mode in which dropout keeps everything."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if _DROPOUT.match(name):
            return args[0] if args else kwargs["input"]
        at, rate = _INNER.get(func, (None, ""))
        args = tuple(0.0 if k == at else a for k, a in enumerate(args))
        return self._called(func, name, args, {**kwargs, rate: 0.0} if rate in kwargs else kwargs)

    def _called(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return the results of a function that is no dropout; `name`: its own."""
        return func(*args, **kwargs)
