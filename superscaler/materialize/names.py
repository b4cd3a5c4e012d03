"""Names of values in a program, and which of them an instruction reads and writes."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable

from superscaler.ir.program import (
    Accumulate,
    Backward,
    Bucket,
    Collective,
    Combine,
    Forward,
    Instruction,
    Load,
    Loss,
    Recv,
    Send,
    Slice,
    Update,
    Wait,
)  # fmt: skip
from superscaler.schedule.edges import Key

# What the parts of a tensor are told apart by: microbatch, part, slice.
_SUFFIX = re.compile(r"_[mps]\d+$")
# What emitted code calls its own: the runtime, the module of segments, the gradient of the loss, what nothing reads;
# and how it names gradients, handles, and further values of one name.
_RESERVED = re.compile(r"(rt|segments|one|_)$|d_|.*(_work|__\d+)$")


def identifier(tensor: str) -> str:
    """Return a Python identifier for a pTensor.

    >>> identifier("transformer.h.0.ln_1.weight")
    'transformer_h_0_ln_1_weight'
    """
    name = re.sub(r"\W", "_", tensor)
    return f"_{name}" if name[:1].isdigit() or keyword.iskeyword(name) else name


def unique_identifiers(tensors: Iterable[str]) -> dict[str, str]:
    """Return a name for each pTensor; those that would be equal, or look like another's part or like what emitted code
    calls its own, get one more letter.

    >>> unique_identifiers(["a.b", "a_b", "x_m0", "rt"])
    {'a.b': 'a_b', 'a_b': 'a_b_', 'x_m0': 'x_m0_', 'rt': '_rt_'}
    """
    found: dict[str, str] = {}
    taken: set[str] = set()
    for tensor in tensors:
        name = identifier(tensor)
        name = f"_{name}_" if _RESERVED.match(name) else name
        while name in taken or _SUFFIX.search(name):
            name += "_"
        taken.add(name)
        found[tensor] = name
    return found


def suffix(key: Key) -> str:
    """Return what tells the names of one part from those of others: its microbatch, its place among them."""
    return (f"_m{key[1]}" if key[1] >= 0 else "") + (f"_p{key[2]}" if key[2] else "")


def tag(segment: int, key: Key) -> str:
    """Return the name of one part of a segment, as Forward and Backward have it."""
    return f"s{segment}{suffix(key)}"


def reads(i: Instruction) -> tuple[str, ...]:
    match i:
        case Forward():
            return i.inputs
        case Backward():
            return tuple(g for g in i.gradients if g is not None)
        case Slice() | Send():
            return (i.source,)
        case Combine():
            return tuple(name for name, _ in i.pieces)
        case Accumulate():
            return (i.into, i.value)
        case Collective():
            return (i.source,) if i.source else ()
        case Bucket():
            return i.sources
        case Wait():
            return (i.work,)
        case Update():
            return tuple(name for pair in (*i.pairs, *i.writes) for name in pair)
        case Loss():
            return i.parts
        case _:
            return ()


def writes(i: Instruction) -> tuple[str, ...]:
    match i:
        case Load() | Slice() | Combine() | Accumulate() | Wait():
            return (i.out,)
        case Forward() | Backward():
            return i.outputs
        case Bucket():
            return i.works
        case Collective() | Recv():
            return (i.work,)
        case _:
            return ()
