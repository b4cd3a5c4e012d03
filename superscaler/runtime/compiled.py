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

from superscaler.errors import brief
from superscaler.runtime.compiled_tape import Compiled, CompiledTape
from superscaler.runtime.functions.draws import Draws, drawn
from superscaler.runtime.inductor import difference, quiet, say
from superscaler.runtime.joint import Joint, trace
from superscaler.runtime.saved_tensors import storage_of
from superscaler.runtime.tapes import Segment, Tape, Tensors, record

Facts = Mapping[str, Any]


class CompiledSegments:
    """Runs the segments of a rank. Segments of one text are compiled once for each combination of shapes.

    What cannot be compiled runs uncompiled, with a warning that names it.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, Compiled | None] = {}

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
            call = _Called(function, [x.detach() for x in given], extra, facts, len(inputs), residents)
            self._made[key] = call.compiled()
        return self._made[key], given


def _form(x: Tensor) -> Hashable:
    return x.shape, x.stride(), x.dtype


@dataclass
class _Called:
    """A call of a segment: `given` are its `inputs` (their number), and maybe words of random numbers."""

    function: Segment
    given: list[Tensor]
    extra: Mapping[str, Any]
    facts: Facts | None
    inputs: int
    residents: Mapping[int, object]

    def compiled(self) -> Compiled | None:
        """Return the compiled segment. None, with a warning, if it cannot be traced or if its graphs are wrong."""
        name, facts = self.function.__name__, self.facts or {}
        constant = facts.get("constant", ())
        wants = [self.facts is not None and n < self.inputs and n not in constant for n in range(len(self.given))]
        resident = [n for n, x in enumerate(self.given) if n in facts.get("again", ()) or id(x) in self.residents]
        try:
            with quiet():
                joint = trace(self._traced, self.given, wants, facts.get("saved"), resident)
            made = Compiled.of(name, joint, facts, self.given, wants)
            wrong = difference(partial(self._eager, joint), self._by_graphs(made))
        except Exception as error:
            say(name, f"it cannot be traced ({type(error).__name__}: {brief(error)})")
            return None
        if wrong:
            say(name, f"it is traced wrongly ({wrong})")
            return None
        made.compile(self.given)
        return made

    def _traced(self, *given: Tensor) -> Tensors:
        """Run the segment while it is traced, with random numbers from their words."""
        more = dict(self.extra)
        if random := more.get("random"):
            forms = random.forms()
            more["random"] = lambda k: drawn(given[-1], k, forms[k])
        return self.function(*given[: self.inputs], **more)

    def _eager(self, joint: Joint) -> list[Tensor]:
        """Return the outputs of the segment as it is, and the gradients of its inputs for `_ends`."""
        inputs = self.given[: self.inputs]
        if self.facts is None:
            return list(self.function(*inputs, **self.extra))
        outputs, tape = record(self.function, inputs, self.extra, self.facts, {})
        saved, given = self.facts.get("saved"), dict(zip(joint.ends, _ends(joint), strict=True))
        gradients = [given.get(k) for k in (range(len(outputs)) if saved is None else saved)]
        again = [inputs[n] for n in self.facts.get("again", ())]
        return [*(x.detach() for x in outputs), *tape.backward(gradients, again, None)]

    def _by_graphs(self, made: Compiled) -> list[Tensor]:
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
        pairs = zip(made.gradients, found, strict=True)
        return [*outputs, *(own.zeros() if g is None else g.to(own.own) for own, g in pairs)]


def _ends(joint: Joint) -> list[Tensor]:
    """Return gradients of outputs, to compare backwards."""
    chance = torch.Generator().manual_seed(0)
    vals = [n.meta["val"] for n in joint.gradients]
    return [torch.randn(x.shape, generator=chance, dtype=torch.float64).to(x.device, x.dtype) for x in vals]
