"""The end of names: a Free after the last use of each, the same on devices that run one program."""

from collections.abc import Callable, Mapping, Sequence

from superscaler.groups import collect
from superscaler.ir.communication import batches
from superscaler.ir.program import ONE, Free, Instruction, Meets, Value, ended, reads, writes
from superscaler.materialize.steps import LoweringOptions


def with_frees(codes: Mapping[int, Sequence[Instruction]], options: LoweringOptions) -> dict[int, list[Instruction]]:
    """Return the code of devices, with a Free after the last use of each name."""
    fold, found = options.fold, {rank: _sends_first(code) for rank, code in codes.items()}
    key = None if options.microbatches else str
    firsts = {d: fold.samples(fold.base(d))[0] for d in fold.sampled} if fold is not None else {}
    done = {rank: _freed(code, key) for rank, code in found.items() if firsts.get(rank, rank) == rank}
    for rank, first in firsts.items():
        if rank != first:
            # The sampled devices of a base use the same names, or else they do not fold.
            frees = [(n, i) for n, i in enumerate(done[first]) if i.frees]
            done[rank] = found[rank]
            for n, i in frees:
                done[rank].insert(n, i)
    return {rank: done[rank] for rank in codes}


def _sends_first(code: Sequence[Instruction]) -> list[Instruction]:
    """Return the code with sends before receives among messages that start together. Then neighbours run the same
    program, whatever the order of their messages.
    """
    done = list(code)
    for first, last in batches(code).items():
        done[first : last + 1] = sorted(code[first : last + 1], key=lambda i: i.meets is Meets.PEER and not i.is_send)
    return done


def _freed(code: Sequence[Instruction], key: Callable[[Value], str] | None) -> list[Instruction]:
    """Return the code with a Free after the last use of each name that still exists then. The runtime keeps weights and
    inputs.
    """
    last: dict[Value, int] = {}
    for at, instruction in enumerate(code):
        last |= dict.fromkeys((*reads(instruction), *writes(instruction)), at)
        for name in ended(instruction):
            del last[name]
    done: list[Instruction] = []
    dying = collect((at, name) for name, at in last.items())
    for at, instruction in enumerate(code):
        done.append(instruction)
        names = tuple(sorted((n for n in dying.get(at, ()) if n != ONE), key=key))
        if names and at < len(code) - 1:
            done.append(Free(names))
    return done
