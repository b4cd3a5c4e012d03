"""Translation validation: emitted code is executed on symbols, and does what its program says, or is refused.

The certificate is a proof about the program; this one carries it over to the text that runs. It executes the text with
stand-ins for `rt` and torch (`steps.py`, `segments.py`), so that no way of writing can hide what the text does.
"""

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

from superscaler.emit.device import Emitted
from superscaler.errors import TranslationError
from superscaler.groups import group_by
from superscaler.ir.cohorts import alike
from superscaler.ir.program import Device, Program
from superscaler.translation.data import Data, is_equal, weight_record
from superscaler.translation.segments import Segments
from superscaler.translation.steps import Step
from superscaler.translation.values import Differs

SEGMENTS = "segments.py"


def check_translation(program: Program, emitted: Emitted) -> None:
    """Raise TranslationError, naming the line, unless emitted code does what the program of each device says.

    Each distinct text runs once, with the data of the sampled devices and of the last one of each fold.
    """
    groups = program.groups
    for ranks, _ in groups:
        if len({emitted.programs[rank] for rank in ranks}) > 1:
            raise TranslationError(f"devices {ranks} have one program, but not one file.")
    checker = _Checker(program, emitted)
    by_file = group_by(range(len(groups)), lambda n: emitted.programs[groups[n][0][0]])
    for name, own in by_file.items():
        for some in alike([groups[n][1][0] for n in own]):
            checker.check(f"{name}.py", [groups[own[n]] for n in some])


class _Checker:
    """The texts of a plan, and the segments that were checked."""

    def __init__(self, program: Program, emitted: Emitted) -> None:
        self._program, self._emitted = program, emitted
        self._segments: Segments | None = None
        self._check_function = cache(self._check_segment)

    def check(self, file: str, groups: Sequence[tuple[list[int], list[Device]]]) -> None:
        """Run the code of a file beside the program of devices that run it; these differ in their data only."""
        data = [one for ranks, samples in groups for one in self._data(file, ranks, samples)]
        step = Step(self._program, groups[0][1][0], data, self._check_function)
        names: dict[str, Any] = {"__builtins__": {"range": range, "reversed": reversed, "__import__": _import}}
        try:
            exec(compile(self._emitted.files[file], file, "exec"), names)
            step.end(names["step"](step))
        except TranslationError:
            raise
        except Exception as error:
            raise self._refusal(file, _line_of(file, error), error) from error
        for (run, place, _), asked in step.asked.items():
            if why := next(filter(None, (one.difference((run, place), asked) for one in data)), ""):
                raise self._refusal(file, asked.line, Differs(why))

    def _data(self, file: str, ranks: Sequence[int], samples: Sequence[Device]) -> list[Data]:
        """Return the data of the sampled devices of a group, and of the last one of the first group."""
        # The sampled devices determine all others; a device without any part has the code of all of them.
        known = [d.rank for d in samples if d.rank in ranks]
        some = dict.fromkeys([*known, *ranks[-1:]] if ranks is self._program.groups[0][0] or not known else known)
        found = [Data(self._program, rank, samples, self._emitted.tables[rank]) for rank in some]
        for one in found:
            wanted = [weight_record(w) for w in self._program.weights(one.rank)]
            if not is_equal(one.tables["weights"], wanted):
                raise TranslationError(f"{file}: the table of weights of device {one.rank} is not that of its program.")
        return found

    def _check_segment(self, number: int, name: str) -> None:
        try:
            if self._segments is None:
                self._segments = Segments(self._emitted.files[SEGMENTS], SEGMENTS)
            self._segments.check(self._program.model, self._program.functions[number], name)
        except Exception as error:
            raise self._refusal(SEGMENTS, _line_of(SEGMENTS, error), error) from error

    def _refusal(self, file: str, line: int, error: Exception) -> TranslationError:
        """Return the error of a line of a file."""
        text = self._emitted.files[file].splitlines()[line - 1].strip() if line else ""
        why = str(error) if isinstance(error, Differs) else f"{type(error).__name__}: {error}"
        return TranslationError(
            f"{file}, line {line}, does not do what the program says: {why}.\n  {text}\nThe plan may be right: its "
            "code is wrong, by a fault of superscaler. Report it with the model and the plan."
        )


def _line_of(file: str, error: Exception) -> int:
    """Return the last line of a file that ran before an error; 0 if none did."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == file else line
        trace = trace.tb_next
    return line


def _import(name: str, *others: object) -> object:
    """Return the module `segments` of a program: each function is its name."""
    if name != "segments":
        raise Differs(f"the code imports {name}")
    return _Names()


class _Names(SimpleNamespace):
    def __getattr__(self, name: str) -> str:
        return name
