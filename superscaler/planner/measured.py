"""Plans that take turns in training on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from superscaler.interrupt import TemporaryFolder
from superscaler.launch.launch import call

# The steps of a turn that are not timed (the third captures a CUDA graph), those that are, and the turns of each plan,
# the fastest of which counts.
_WARM, _STEPS, _TURNS = 3, 6, 3
# Plans within so many times the shortest step take as many turns again: what else the machine does may be as much.
_NEAR = 1.06


def measured(
    plans: Sequence[str],
    save: Callable[[str, Path], object],
    world: int,
    torch_compile: bool = False,
    cuda_graph: bool = False,
    turns: int = _TURNS,
) -> dict[str, float]:
    """Return the seconds of a step of each plan, trained by `world` processes of this machine. `save`: writes a plan
    into a directory. `torch_compile`, `cuda_graph`: as of `ss.load`. `turns`: of each plan.

    Plans take turns, so that what else the machine does slows all of them; those that are near the shortest step take
    more.
    """
    with TemporaryFolder() as name:
        for number, plan in enumerate(plans):
            save(plan, Path(name) / f"plan{number}")

        def steps(some: Sequence[str]) -> dict[str, float]:
            numbers = ",".join(str(plans.index(plan)) for plan in some)
            options = (turns, numbers, int(torch_compile), int(cuda_graph))
            found = call(train_in_turns, world, name, *map(str, options))
            return dict(zip(some, map(max, zip(*found, strict=True)), strict=True))

        found = steps(plans)
        near = [plan for plan in plans if found[plan] < _NEAR * min(found.values())]
        again = steps(near) if len(near) > 1 else {}
    return found | {plan: min(found[plan], seconds) for plan, seconds in again.items()}


def train_in_turns(folder: str, turns: str, numbers: str, torch_compile: str, cuda_graph: str) -> list[float]:
    """Return the seconds of a step of some plans in a folder, on this rank."""
    from superscaler.runtime.load import load
    from superscaler.train.loop import choose_batches

    found = dict.fromkeys(numbers.split(","), float("inf"))
    for turn in range(int(turns)):
        for number in found:
            step = load(
                Path(folder) / f"plan{number}", torch_compile=torch_compile == "1", cuda_graph=cuda_graph == "1"
            )
            batches = choose_batches(step, None, turn)
            for n in range(_WARM + _STEPS):
                if n == _WARM:
                    step.state.communicator.barrier()
                    start = time.perf_counter()
                step(batches(n))
            step.state.communicator.barrier()
            found[number] = min(found[number], (time.perf_counter() - start) / _STEPS)
            if step.watch is not None:
                step.watch.close()
    return [*found.values()]
