"""Joined programs: they hold, they compute the same, and they lose no recomputation."""

from pathlib import Path

import pytest

import superscaler as ss
from superscaler.certify.certificate import certify
from superscaler.emit.device import emit
from superscaler.errors import InputError, ScheduleError
from superscaler.ir.fold import Folded
from superscaler.ir.loops import Rolled, weighted
from superscaler.ir.program import Backward, Forward, Program
from superscaler.materialize.joined import join
from superscaler.materialize.joined.join import joined
from superscaler.plan import Plan
from superscaler.simulate.predict import simulate
from superscaler.simulate.system import System
from superscaler.translation.check import check_translation
from superscaler.verify import compare_with_eager
from superscaler.verify.plan_dir import validate_directory
from tests.helpers.counted import counted
from tests.helpers.graphs import graph_of
from tests.helpers.ran import exact
from tests.helpers.random_graphs import largest_error, random_model, random_plan

GPT2, LLAMA = "gpt2:size=tiny", "llama:size=tiny"
# The forwards and backwards of the last device in a step, and those of joined segments.
CALLS = {
    ("single", "local:1"): ((3, 2), (1, 1)),
    ("data_parallel", "local:2"): ((3, 2), (2, 1)),
    ("gradient_accumulation", "local:1"): ((12, 8), (8, 4)),
    ("recompute", "local:1"): ((7, 4), (5, 4)),
    # Between two segments there is always a gather, a message or a sum of other devices.
    ("zero:stage=3", "local:2"): ((7, 4), (7, 4)),
    ("pipeline_1f1b", "local:2"): ((8, 4), (8, 4)),
    ("tensor_parallel", "local:2"): ((14, 13), (14, 13)),
    ("zb_h1", "local:2"): ((8, 8), (8, 8)),
}
FAST = ("single", "data_parallel", "recompute", "tensor_parallel")
# Others that are compared with the module.
MORE = ("data_parallel", "co_shard:parts=4", "chunked_loss", "gradient_accumulation:microbatches=4", "bytescheduler")


def calls(program: Program) -> tuple[int, int]:
    """Return the forwards and the backwards of the last device in a step."""
    code = list(weighted(program.devices[-1].instructions))
    forwards, backwards = (sum(n for i, n in code if isinstance(i, kind)) for kind in (Forward, Backward))
    return forwards, backwards


def holds(program: Program) -> Program:
    """Return the joined program of a plan, once it is certified and its code does what it says."""
    found = joined(program)
    certify(found)
    check_translation(found, emit(found))
    return found


@pytest.mark.parametrize("model", [GPT2, pytest.param(LLAMA, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("plan", "cluster"), [pytest.param(*on, marks=[] if on[0] in FAST else pytest.mark.slow) for on in CALLS]
)
def test_works_with_nothing_between_them_are_one(plan: str, cluster: str, model: str) -> None:
    program = ss.compile(graph_of(model), plan, cluster).compiled.program
    assert (calls(program), calls(holds(program))) == CALLS[plan, cluster]


@pytest.mark.parametrize(
    "plan", ["single", "recompute", *(pytest.param(plan, marks=pytest.mark.slow) for plan in MORE)]
)
def test_joined_steps_equal_the_module(plan: str) -> None:
    found = exact(graph_of(GPT2), plan, 2 if plan in ("data_parallel", "bytescheduler") else 1).joined
    assert compare_with_eager(found)["equal"]


def test_what_is_recomputed_is_not_joined_with_its_original() -> None:
    """Else the compiler, or autograd, would keep what the plan drops."""
    found = joined(ss.compile(graph_of(GPT2), "recompute", "local:1").compiled.program)
    several = [f for f in found.functions if len({op.region or op.origin for op in f.ops}) > 1]
    assert several
    for function in found.functions:
        names = {op.name for op in function.ops}
        assert not any(op.origin in names for op in function.ops)
        # No tape holds what is recomputed: its originals run without one.
        assert not function.grads or not any(op.region and not op.origin for op in function.ops)


@pytest.mark.parametrize("plan", ["recompute", pytest.param("co_shard:parts=4", marks=pytest.mark.slow)])
def test_joined_steps_take_the_memory_that_the_plan_takes(plan: str) -> None:
    """A count of storages under autograd, as a segment runs that Inductor refuses."""
    found = ss.compile(graph_of(GPT2), plan, "local:1")
    assert counted(Plan(found.compiled.joined), 0) == counted(found, 0)


def test_a_loop_over_microbatches_stays_one() -> None:
    graph = graph_of("gpt2:size=tiny,layers=4,batch=16")
    program = ss.compile(graph, "gradient_accumulation:microbatches=16", "local:1")
    plain = program.compiled.program
    found = holds(plain)
    assert isinstance(plain.devices[0].instructions, Rolled)
    assert isinstance(found.devices[0].instructions, Rolled)
    assert (calls(plain), calls(found)) == ((48, 32), (32, 16))


def test_folded_devices_stay_folded() -> None:
    plain = ss.compile(graph_of("gpt2:size=tiny"), "data_parallel", "local:8").compiled.program
    found = holds(plain)
    assert isinstance(plain.devices, Folded)
    assert isinstance(found.devices, Folded)
    assert (calls(plain), calls(found)) == ((3, 2), (2, 1))


def test_no_device_waits_for_a_scalar_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others would wait for the members of a segment, the wait for a scalar stays between them."""
    program = ss.compile(graph_of(GPT2), "data_parallel", "local:2").compiled.program
    assert calls(joined(program)) == (2, 1)

    def refuses(_: Program) -> None:
        raise ScheduleError("a device waits forever")

    monkeypatch.setattr(join, "check_rendezvous", refuses)
    assert joined(program) is program


SEEDS = (0, 1, 2, 3, 5, 11)


@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(n, marks=pytest.mark.slow) for n in range(56) if n not in SEEDS)]
)
def test_random_plans_are_joined_and_equal(seed: int) -> None:
    """In 11 a gradient from outside of two neighbours is made of a gradient that one of them makes."""
    model, values = random_model(seed, 6)
    compiled = random_plan(model, seed + 1, 1 + seed % 4, seed % 4 == 1)
    holds(compiled.program)
    assert largest_error(compiled.joined, values)[0] < 1e-9


def test_a_plan_directory_has_the_code_of_compiled_steps(tmp_path: Path) -> None:
    """`ss.load` runs it with `torch_compile` alone, and it is checked as the other code is."""
    plan, folder = ss.compile(graph_of(GPT2), "single", "local:1"), tmp_path / "plan"
    plan.save(folder, evaluation=False)
    found = validate_directory(folder)
    assert (found["works"], found["compiled_works"]) == (5, 2)
    files = {ss.load(folder, torch_compile=k).form.function.__code__.co_filename for k in (False, True)}
    assert files == {f"{folder}/program_0.py", f"{folder}/compiled_program_0.py"}
    code = folder / "compiled_program_0.py"
    code.write_text(code.read_text().replace("d_transformer", "d_all"))
    with pytest.raises(InputError, match=r"compiled_program_0\.py"):
        ss.load(folder, torch_compile=True)
    with pytest.raises(InputError, match=r"compiled_program_0\.py, line \d+ is 'd_all = "):
        validate_directory(folder, manifest=False)


def test_a_plan_that_is_as_long_as_it_can_be_has_one_program(tmp_path: Path) -> None:
    ss.compile(graph_of(GPT2), "tensor_parallel", "local:2").save(tmp_path / "plan", evaluation=False)
    assert not list((tmp_path / "plan").glob("compiled_*"))
    found = validate_directory(tmp_path / "plan")
    assert found["works"] == found["compiled_works"] == 27


def test_a_compiled_step_is_predicted_from_its_own_program() -> None:
    program = ss.compile(graph_of("mlp:layers=2,hidden=8"), "single", "local:1").compiled.program
    found = {k: calls(simulate(program, ss.Cluster.parse("a100:1x1"), system=System(k)).program) for k in (False, True)}
    assert found == {False: (3, 2), True: (1, 1)}
