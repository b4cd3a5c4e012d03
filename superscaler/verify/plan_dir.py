"""Checks of a plan directory: its program is certified, and its code and data are those of the program."""

import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from superscaler.artifact import described, of_compiled, texts, texts_of_compiled
from superscaler.certify.certificate import CHECKS, certify
from superscaler.cluster import Cluster
from superscaler.emit.device import Emitted, emit
from superscaler.errors import InputError
from superscaler.ir.program import Program
from superscaler.materialize.joined.join import joined, most_works
from superscaler.report.identity import own_operators
from superscaler.report.journal import parse
from superscaler.report.schema import Account
from superscaler.report.subject import Subject, subject
from superscaler.runtime.metrics import Known
from superscaler.simulate.predict import fullest, predict
from superscaler.simulate.prediction import Prediction
from superscaler.simulate.segments import model_flops
from superscaler.simulate.system import PLAIN, System
from superscaler.store.plan import read_plan, shapes_in
from superscaler.store.plan_head import (
    EXPLAIN_FILE,
    JOURNAL_FILE,
    MODEL_FILE,
    PLAN_FILE,
    PROGRAM_FILE,
    REWRITE,
    SHAPES,
    WEIGHTS_FILE,
)
from superscaler.store.program import naming, program_of
from superscaler.store.tensor_file import kinds, opened
from superscaler.translation.check import check_translation

# The kinds of tensors in the file of weights of a plan of another shape.
_UNOWNED = ("constant",)


def validate_directory(directory: Path, manifest: bool = True) -> dict[str, Any]:
    """Certify the programs in a plan directory, those of compiled steps and of other shapes included, and check that
    the code and plan.json belong to these; with `manifest` also that each file has the hash in plan.json.

    Raises ScheduleError for a refused program, InputError for a directory that cannot be read, or with files that
    disagree.
    """
    found = _validated(directory, manifest)
    for folder in shapes_in(directory):
        _validated(folder, manifest, is_shape=True)
    return found


def _validated(directory: Path, manifest: bool, is_shape: bool = False) -> dict[str, Any]:
    saved, damage = read_plan(directory, has_hashes=False), _damage(directory)
    plan, program = saved.head, program_of(saved, damage)
    model = program.model
    if program.world != plan["world"]:
        raise InputError(f"{directory / PLAN_FILE} is for {plan['world']} devices, its program for {program.world}.")
    with naming(f"{directory / PROGRAM_FILE} of {MODEL_FILE}", damage):
        emitted = _checked(program)
        files, data = texts(program, emitted), described(program, emitted, plan["cluster"], plan["seed"])
        longer = joined(program)
        if longer is not program:
            compiled = _checked(longer)
            files, data = files | texts_of_compiled(longer, compiled), data | of_compiled(emitted, compiled)
    for name, text in files.items():
        _compare(directory / name, saved.text(name), text)
    wanted = json.loads(json.dumps(data))
    # The program has the names of operators, but not the files that register them.
    wanted["operators"] = {target: plan["operators"].get(target) for target in sorted(own_operators(model))}
    found = {key: value for key, value in plan.items() if key != "manifest"}
    difference = next(_differences(found, wanted), None)
    if difference is not None:
        raise InputError(f"{directory / PLAN_FILE}: {difference}")
    _check_weights(directory / WEIGHTS_FILE, program, _UNOWNED if is_shape else ())
    if manifest and damage is not None:
        raise damage
    works = {"works": most_works(program), "compiled_works": most_works(longer)}
    return {**dict.fromkeys(CHECKS, True), "manifest": manifest, "world": program.world, **works}


def _checked(program: Program) -> Emitted:
    """Certify a program, and return its code, which is checked, too."""
    certify(program)
    emitted = emit(program)
    check_translation(program, emitted)
    return emitted


def simulate_directory(
    directory: Path, cluster: str, capacity: int | None = None, system: System = PLAIN
) -> Prediction:
    """Return the prediction for a step of the plan in a directory, on its own cluster or on another one; see `predict`.

    Raises InputError for a directory that cannot be read, or a cluster of another size.
    """
    saved = read_plan(directory)
    saved.check()
    program, found = program_of(saved), Cluster.parse(cluster or saved.head["cluster"])
    if len(found.devices) != program.world:
        raise InputError(
            f"the plan in {directory} is for {program.world} devices, but {found} has {len(found.devices)}; give a "
            "cluster of as many, or compile the model for this one."
        )
    return predict(program, found, capacity, system)


def known_of(program: Program, cluster: Cluster, peak_bytes: int) -> Known:
    """Return the facts about a step of a program before it runs."""
    flops, kind = model_flops(program.model), cluster.device_kind
    dtype = max(flops, key=lambda name: flops[name], default="float32")
    peak = 0.0 if kind is None else kind.flops.get(dtype, 0.0)
    return Known(sum(flops.values()) / program.world, float(peak), peak_bytes)


def known_directory(directory: Path) -> Known:
    """Return the facts about a step of the plan in a directory, none where its program cannot be predicted. Of several
    shapes the memory is that of the largest.
    """
    # A plan may be edited, and have operators of a user, which do not run on tensors without data.
    with suppress(Exception):
        root = directory.parents[1] if directory.parent.name == SHAPES else directory
        programs = {folder: program_of(read_plan(folder, has_hashes=False)) for folder in (root, *shapes_in(root))}
        cluster = Cluster.parse(read_plan(root, has_hashes=False).head["cluster"])
        peak = max(fullest(program, cluster).peak for program in programs.values())
        return known_of(programs[directory], cluster, peak)
    return Known()


def subject_of(directory: Path, run: Path | None = None) -> Subject:
    """Return the plan in a directory as the subject of a report, with the profile of a `run`.

    Raises InputError for a directory or a run that cannot be read.
    """
    saved = read_plan(directory)
    saved.check()
    program = program_of(saved)
    account, journal = saved.json(EXPLAIN_FILE, Account), parse(saved.text(JOURNAL_FILE))
    cluster = Cluster.parse(saved.head["cluster"])
    title, code = directory.resolve().name, saved.head["manifest"]["code"]
    return subject(title, program, cluster, account, journal, certify(program), run, code)


def _damage(directory: Path) -> InputError | None:
    """Return the damage of a directory that its hashes show."""
    try:
        read_plan(directory).check()
    except InputError as error:
        return error
    return None


def _compare(file: Path, found: str, wanted: str) -> None:
    if found == wanted:
        return
    pairs = zip_longest(found.splitlines(), wanted.splitlines(), fillvalue="")
    for number, (a, b) in enumerate(pairs, 1):
        if a != b:
            raise InputError(f"{file}, line {number} is '{a.strip()[:80]}', but the program says '{b.strip()[:80]}'.")
    raise InputError(f"{file} differs from what the program says in its blanks or line ends.")


def _differences(found: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """Yield the differences of data from the wanted data, with the path to each."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in {**wanted, **found}:
            if key not in found or key not in wanted:
                yield f"{where}{key} {'is missing' if key in wanted else 'is not of this plan'}."
            else:
                yield from _differences(found[key], wanted[key], f"{where}{key}, ")
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
            yield from _differences(a, b, f"{where}{number}, ")
    elif type(found) is not type(wanted) or found != wanted:
        yield f"{where.rstrip(', ')} is {str(found)[:80]}, but the program says {str(wanted)[:80]}."


def _check_weights(file: Path, program: Program, kinds_there: Collection[str]) -> None:
    """Check that every weight at rest is in the file, whole and of its dtype. `kinds_there`: only those of some kinds,
    if any.
    """
    tensors = program.model.tensors
    at_rest = {w.tensor for device, _ in program.distinct for w in device.weights}
    needed = {name for name in at_rest if not kinds_there or tensors[name].kind in kinds_there}
    with opened(file, REWRITE) as stored:
        found = kinds(stored)
    for name in sorted(needed):
        tensor = program.model.tensors[name]
        if found.get(name) != (tensor.shape, tensor.dtype):
            raise InputError(f"{file} has {name} as {found.get(name)}, but it is {tensor.dtype} {tensor.shape}.")
