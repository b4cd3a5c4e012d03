"""Graphs as Inductor compiles them, each compared with its operators one by one when it first runs."""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from threading import RLock
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from superscaler.errors import brief
from superscaler.runtime.compiled.in_parts import InParts
from superscaler.runtime.compiled.joint import inductor_context, like

# A compiled graph: it empties the list of its inputs.
Call = Callable[[list[Tensor]], Sequence[Any]]
Results = Sequence[Tensor | None]
# Compiles a graph with a name for inputs of the forms of these, traced in this mode; True: it is a backward.
Compiler = Callable[[str, fx.GraphModule, Sequence[Tensor], FakeTensorMode, bool], Call]
# Inductor is for one thread at a time; ranks may be threads.
LOCK = RLock()
# The numbers of parts of sums, whose effect is the noise; how often an error may exceed it.
_PARTS, _SPREAD = (2, 3), 4.0
# The least noise of a number in float64, whose sums Inductor orders in another way.
_LEAST = 1e-11


def cache_folder() -> Path:
    """Return the folder in which torch keeps compiled graphs."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def compiled(graph: fx.GraphModule, given: Sequence[Tensor], mode: FakeTensorMode, is_backward: bool) -> Call:
    """Return a graph as Inductor compiles it for inputs of these shapes.

    Of several processes of a machine the first compiles it, the others read what it made.
    """
    import torch._inductor.config as config
    from filelock import FileLock
    from torch._inductor.compile_fx import compile_fx_inner

    with mode:
        fakes = [like(x) for x in given]
    folder = cache_folder() / "superscaler"
    folder.mkdir(parents=True, exist_ok=True)
    text = f"{graph.code}{[(x.shape, x.stride(), x.dtype) for x in given]}"
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    # Segments check shapes themselves.
    with FileLock(folder / f"{name}.lock"), inductor_context(mode), config.patch(size_asserts=False):
        made: Call = compile_fx_inner(graph, fakes, is_backward=is_backward)
    return made


def plain(graph: fx.GraphModule) -> Call:
    """Return a graph that runs operator by operator."""

    def run(given: list[Tensor]) -> Sequence[Any]:
        own = tuple(given)
        given.clear()
        return graph(*own)

    return run


def checked(name: str, graph: fx.GraphModule, given: Sequence[Tensor], mode: FakeTensorMode, is_backward: bool) -> Call:
    """Return a graph as Inductor compiles it, if it gives the results of its operators on these inputs, but for
    rounding; else the graph that runs operator by operator, with a warning that names it.
    """
    try:
        with quiet():
            made = compiled(graph, given, mode, is_backward)
        wrong = difference(lambda: graph(*given), made(list(given)))
    except Exception as error:
        say(name, f"Inductor refuses it ({type(error).__name__}: {brief(error)})")
        return plain(graph)
    if wrong:
        say(name, f"Inductor computes it wrongly ({wrong})")
        return plain(graph)
    return made


def say(name: str, why: str) -> None:
    """Warn that a segment is not compiled."""
    warnings.warn(f"{name} of segments.py runs uncompiled: {why}.", stacklevel=2)


@contextmanager
def quiet() -> Iterator[None]:
    """Compile in the block, which is for one thread at a time. What Inductor writes of an error is pages long."""
    with LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Read in the lock: another thread has switched it off meanwhile.
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


def difference(run: Callable[[], Results], found: Results) -> str:
    """Return the first error of results that is beyond the noise of reordered sums in a function; '' for none."""
    expected = run()
    limits = _limits(run, expected)
    for n, (a, b, limit) in enumerate(zip(found, expected, limits, strict=True)):
        if (a is None) != (b is None):
            return f"result {n} is {'missing' if a is None else 'not expected'}"
        if a is not None and b is not None and not (error := _error(a, b)) <= limit:
            return f"the error of result {n} is {error:.2g}, where rounding allows {limit:.2g}"
    return ""


def _limits(run: Callable[[], Results], expected: Results) -> list[float]:
    """Return the error that each result may have: at least the median of all, as rounding may cancel by chance."""
    noise = [0.0] * len(expected)
    for count in _PARTS:
        with InParts(count):
            repeated = run()
        pairs = zip(repeated, expected, strict=True)
        errors = [0.0 if a is None or b is None else _error(a, b) for a, b in pairs]
        # float16 may overflow in one order of addition only; that allows no error.
        noise = [max(x, error if math.isfinite(error) else 0.0) for x, error in zip(noise, errors, strict=True)]
    kinds = [x.dtype for x in expected if x is not None and x.is_floating_point()]
    least = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
    usual = max(median([x for x in noise if x > 0] or [0.0]), least, _LEAST)
    return [_SPREAD * max(x, usual) for x in noise]


def _error(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, relative to the largest element, where the expected one is finite."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if not b.numel():
        return 0.0
    if not b.is_floating_point():
        return 0.0 if torch.equal(a, b) else math.inf
    finite = b.isfinite()
    gap = (a.double() - b.double()).abs().where(finite, 0.0).max()
    return float(gap / b.double().abs().where(finite, 0.0).max().clamp(min=1e-300))
