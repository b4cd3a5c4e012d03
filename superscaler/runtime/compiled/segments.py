"""The segments of a rank as Inductor compiles them: two graphs each, called directly.

There is no Dynamo, and no autograd while they run: a segment is traced once for its shapes (`joint.py`), its forward
and its backward are compiled when they first run, and what a forward keeps is a list.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from superscaler.errors import brief
from superscaler.runtime.compiled.inductor import Compiler, checked, difference, quiet, say
from superscaler.runtime.compiled.joint import Joint, reshape_views, trace
from superscaler.runtime.compiled.tape import Compiled, CompiledTape
from superscaler.runtime.functions.draws import Draws, drawn
from superscaler.runtime.saved_tensors import storage_of
from superscaler.runtime.tapes import Segment, Tape, Tensors, record

Facts = Mapping[str, Any]


class CompiledSegments:
    """Runs the segments of a rank. Segments of one text are compiled once for each combination of shapes.

    What cannot be compiled runs uncompiled, with a warning that names it.
    """

    compiler: Compiler = staticmethod(checked)

    def __init__(self) -> None:
        self._made: dict[Hashable, Compiled | None] = {}

    def compiled(self, call: Called) -> Compiled | None:
        """Return a segment that is compiled for a call, None if it runs uncompiled."""
        try:
            made = call.traced(self.compiler)
            for graph in (made.joint.forward, made.joint.backward):
                if graph is not None:
                    reshape_views(graph)
            wrong = difference(partial(call.eager, made.joint), call.by_graphs(made))
        except Exception as error:
            say(call.name, f"it cannot be traced ({type(error).__name__}: {brief(error)})")
            return None
        if wrong:
            say(call.name, f"it is traced wrongly ({wrong})")
            return None
        made.compile(call.given)
        return made

    def run(self, function: Segment, inputs: Sequence[Tensor], extra: Mapping[str, Any]) -> Tensors:
        """Return the results of a segment without a backward."""
        with torch.no_grad():
            made, given = self._of(function, inputs, extra, None, {})
            if made is None:
                return function(*(x.detach() for x in inputs), **extra)
            return tuple(made.forward(given))

    def record(
        self,
        function: Segment,
        inputs: Sequence[Tensor],
        extra: Mapping[str, Any],
        facts: Facts,
        residents: Mapping[int, object],
    ) -> tuple[Tensors, Tape | CompiledTape]:
        """Run a segment as `tapes.record` does."""
        with torch.no_grad():
            made, given = self._of(function, inputs, extra, facts, residents)
            if made is not None:
                values, count = list(given), len(given)
                values += made.forward(given)
                return tuple(values[count : count + made.joint.outputs]), CompiledTape(made, values)
        return record(function, inputs, extra, facts, residents)

    def _of(
        self,
        function: Segment,
        inputs: Sequence[Tensor],
        extra: Mapping[str, Any],
        facts: Facts | None,
        residents: Mapping[int, object],
    ) -> tuple[Compiled | None, list[Tensor]]:
        """Return a compiled segment, None if it runs uncompiled, and its inputs: the last one is for random numbers.
        Without `facts` it has no backward.
        """
        random: Draws | None = extra.get("random")
        given = [*inputs] if random is None else [*inputs, random.words()]
        key = function, facts is None, random and random.forms(), repr(extra.get("parts")), *map(_form, given)
        if key not in self._made:
            resident = {n for n, x in enumerate(given) if id(x) in residents}
            call = Called(function, [x.detach() for x in given], extra, facts, len(inputs), resident)
            # A mode that looks at the step is not for what a compiler does.
            with _disable_current_modes():
                self._made[key] = self.compiled(call)
        return self._made[key], given


def _form(x: Tensor) -> Hashable:
    return x.shape, x.stride(), x.dtype


@dataclass
class Called:
    """A call of a segment: `given` are its `inputs` (their number), and maybe words of random numbers. `resident`: the
    numbers of those that are weights at rest.
    """

    function: Segment
    given: list[Tensor]
    extra: Mapping[str, Any]
    facts: Facts | None
    inputs: int
    resident: set[int]

    @property
    def name(self) -> str:
        return self.function.__name__

    def traced(self, compiler: Compiler) -> Compiled:
        """Return the segment with its graphs."""
        facts = self.facts or {}
        constant, again = facts.get("constant", ()), facts.get("again", ())
        wants = [self.facts is not None and n < self.inputs and n not in constant for n in range(len(self.given))]
        with quiet():
            joint = trace(self._run, self.given, wants, facts.get("saved"), sorted(self.resident.union(again)))
        return Compiled.of(self.name, joint, facts, self.given, wants, compiler)

    def _run(self, *given: Tensor) -> Tensors:
        """Run the segment while it is traced, with random numbers from their words."""
        more = dict(self.extra)
        if random := more.get("random"):
            forms = random.forms()
            more["random"] = lambda k: drawn(given[-1], k, forms[k])
        return self.function(*given[: self.inputs], **more)

    def eager(self, joint: Joint) -> list[Tensor]:
        """Return the outputs of the segment as it is, and the gradients of its inputs for `_ends`."""
        inputs = self.given[: self.inputs]
        if self.facts is None:
            return list(self.function(*inputs, **self.extra))
        outputs, tape = record(self.function, inputs, self.extra, self.facts, {})
        saved, given = self.facts.get("saved"), dict(zip(joint.ends, _ends(joint), strict=True))
        gradients = [given.get(k) for k in (range(len(outputs)) if saved is None else saved)]
        again = [inputs[n] for n in self.facts.get("again", ())]
        return [*(x.detach() for x in outputs), *tape.backward(gradients, again, None)]

    def by_graphs(self, made: Compiled) -> list[Tensor]:
        """Return the same by the graphs, operator by operator."""
        joint = made.joint
        values = [*self.given, *joint.forward(*self.given)]
        gathered = {storage_of(self.given[n]) for n in (self.facts or {}).get("again", ())}
        if any(n >= len(self.given) and storage_of(values[n]) in gathered for n in joint.kept):
            raise NotImplementedError("its backward reads a view of a weight that is gathered again")
        outputs = values[len(self.given) :][: joint.outputs]
        if joint.backward is None:
            return outputs
        found = joint.backward(*(values[n] for n in joint.kept), *_ends(joint))
        return [*outputs, *(made.zeros(n) if g is None else g.to(made.kind(n)) for n, g in enumerate(found))]


def _ends(joint: Joint) -> list[Tensor]:
    """Return gradients of outputs, to compare backwards."""
    chance = torch.Generator().manual_seed(0)
    vals = [n.meta["val"] for n in joint.gradients]
    return [torch.randn(x.shape, generator=chance, dtype=torch.float64).to(x.device, x.dtype) for x in vals]
