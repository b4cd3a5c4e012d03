"""Values that are written as one list, because the same instructions use them: weights at rest, and sums of gradients.

transformer_h = rt.weights_of("transformer.h")
d_transformer_h = rt.sums(24)
"""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import groupby, takewhile

from superscaler.ir.codes import NONE
from superscaler.ir.program import FIELDS, VALUES, Instruction, Load, Role, Update, Value, Weight, names

# By value without its microbatch, the list that it is in, as a value, and its place there.
Places = dict[Value, tuple[Value, int]]
Modules = Mapping[str, Sequence[str]]
# Values in one field of an instruction; None for those that are in no list.
Field = tuple[Value | None, ...]


def family(value: Value) -> Value:
    """Return a value without its microbatch."""
    return value._replace(microbatch=0)


def lists_of(rows: Sequence[Instruction], weights: Container[Value]) -> Places:
    """Return the places of sums, and of those of the `weights` that are in a list.

    Values share a list if they end together, and stand one after the other wherever segments, backwards or
    communication use them. A sum without such neighbours, or of one microbatch, has a list of its own.
    """
    fields = {(n, f): some for n, i in enumerate(rows) for f, some in enumerate(_fields(i, weights))}
    uses: dict[Value, list[tuple[int, int]]] = {}
    for at, some in fields.items():
        for value in some:
            if value is not None:
                uses.setdefault(value, []).append(at)
    ends = {value: n for n, i in enumerate(rows) for value in names(i, Role.END)}
    taken = {str(v) for i in rows for role in VALUES for v in names(i, role)}
    found: Places = {}
    for some in fields.values():
        for _, group in groupby(some, lambda v: v and (v.microbatch == NONE, uses[v], ends.get(v))):
            own = [v for v in group if v is not None and family(v) not in found]
            if len(own) > 1 and own[0].microbatch == NONE and _is_run(own, [fields[at] for at in uses[own[0]]]):
                name = _name(own, taken)
                found |= {family(v): (name, place) for place, v in enumerate(own)}
            else:
                found |= {family(v): (v, 0) for v in own if v.is_gradient}
    return found


def _fields(i: Instruction, weights: Container[Value]) -> Iterator[Field]:
    for role in () if isinstance(i, Update) else (Role.READ, Role.SUM):
        for name in FIELDS[type(i), role]:
            value = getattr(i, name)
            some = (value,) if isinstance(value, Value) else value
            yield tuple(v if role is Role.SUM or v in weights else None for v in some)


def _is_run(own: Sequence[Value], fields: Sequence[Field]) -> bool:
    """Return whether values, each once, stand one after the other in all fields."""
    return len({*own}) == len(own) and all(
        some[(at := some.index(own[0])) : at + len(own)] == tuple(own) for some in fields
    )


def _name(own: Sequence[Value], taken: set[str]) -> Value:
    """Return a name for a list, after the words that the names of its values share."""
    columns = zip(*(v.name.split("_") for v in own), strict=False)
    shared = "_".join(first for first, *_ in takewhile(lambda words: len({*words}) == 1, columns)).strip("_")
    shared = shared if shared.isidentifier() else "weights"
    while (
        str(name := Value(shared, own[0].is_gradient)) in taken or Value.parse(str(name)) != name or shared[-2:] == "_m"
    ):
        shared += "_"
    taken.add(str(name))
    return name


def modules_of(tensors: Sequence[str]) -> Modules:
    """Return the tensors of each name, and those in each module, in order."""
    found: dict[str, list[str]] = {}
    for tensor in tensors:
        words = tensor.split(".")
        for n in range(1, len(words) + 1):
            found.setdefault(".".join(words[:n]), []).append(tensor)
    return found


def named_weights(weights: Sequence[Weight], rows: Sequence[Instruction], modules: Modules) -> dict[Value, str]:
    """Return the tensors of the weights that have a name of the model to themselves on a device and are loaded once."""
    loads = Counter(i.out for i in rows if isinstance(i, Load))
    return {w.name: w.tensor for w in weights if loads[w.name] == 1 and modules[w.tensor] == [w.tensor]}


def paths_of(own: Sequence[str], modules: Modules) -> list[str]:
    """Return the fewest paths of modules and tensors that stand for some tensors, in order.

    >>> paths_of(["h.0.a", "h.0.b", "h.1.a"], modules_of(["w", "h.0.a", "h.0.b", "h.1.a", "h.1.b"]))
    ['h.0', 'h.1.a']
    """
    found, left = list[str](), list(own)
    while left:
        words = left[0].split(".")
        paths = (".".join(words[:n]) for n in range(1, len(words) + 1))
        found.append(next(path for path in paths if modules[path] == left[: len(modules[path])]))
        del left[: len(modules[found[-1]])]
    return found
