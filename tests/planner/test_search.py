"""Searches: the best plan of a space beside all of its plans, constraints, and the command."""

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import pytest

import superscaler as ss
from superscaler.errors import InputError
from superscaler.planner import menu as menus
from superscaler.planner.candidates import Errors, finalists, next_finalist
from superscaler.planner.constraints import NUMBERS, WORDS, left, read
from superscaler.planner.estimate import Estimate
from superscaler.planner.kinds import reduced, runs
from superscaler.planner.menu import Menu
from superscaler.planner.search import Answer, _layouts, _proofs, _uncut, search
from superscaler.planner.space import Choice, Own, Use, choices
from superscaler.planner.whole import lines as wholes
from superscaler.planner.whole import programs
from superscaler.planner.whole.programs import Found, Programs
from superscaler.plans import resolve
from superscaler.simulate import segments
from superscaler.simulate.recording import Recorder
from superscaler.simulate.system import PLAIN, System
from tests.helpers.commands import answer, run
from tests.helpers.graphs import graph_of
from tests.helpers.ran import equal
from tests.helpers.sweeps import slow

GPT = "gpt2:size=tiny,layers=4,batch=8"
# Few plans, of few uses of devices.
FEW = "rows = 4, no recompute, no ulysses, no ring"
# Those of one stage that save no memory.
ONE = f"{FEW}, pp = 1, no zero, no chunked, no swap"
# A model of two axes and of several passes.
FOLDED = "alphafold2:size=tiny,layers=2,passes=2,batch=8"
# A model whose products take longer than the launches of kernels.
LARGE = "gpt2:layers=4,hidden=1024,heads=16,seq=512,vocab=8192,batch=16,device=meta"


@cache
def few() -> Answer:
    """Return what a search among few plans finds."""
    return search(graph_of(GPT), "a100:1x2", where=FEW)


def _fastest(graph: ss.Graph, cluster: ss.Cluster, memory: int) -> float:
    """Return the seconds of the fastest plan of a whole space that fits."""
    best = inf
    for choice in choices(cluster, 16, 4, layouts=["sequence"]):
        try:
            p = ss.compile(graph, choice.spec, cluster).simulate(memory)
        except ss.PlanError:
            continue
        best = min(best, p.step_seconds) if p.fits else best
    return best


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("memory", [80 * 10**9, 6 * 10**9])
def test_a_search_finds_the_fastest_plan_of_the_space(memory: int) -> None:
    """Beside a loop over the space, which compiles and simulates every plan whole."""
    graph, cluster = graph_of(LARGE), ss.Cluster.parse("a100:1x4")
    answer, fastest = search(graph, cluster, memory), _fastest(graph, cluster, memory)
    assert answer.best.prediction.fits
    assert answer.best.prediction.step_seconds <= 1.001 * fastest
    assert 0.9 * fastest < answer.bound <= fastest


def test_a_model_that_couples_microbatches_has_plans_of_one() -> None:
    """The balance of Mixtral's experts is of the whole batch, however large that is."""
    lines, graph = list[str](), graph_of("mixtral:size=tiny,batch=36,device=meta")
    graph = reduced(graph, runs(graph), [1], 36)
    found = search(graph, "a100:1x2", where="dp = 2, no recompute, zero = 0, loss = whole, no swap", note=lines.append)
    assert {(e.choice.rows, e.choice.microbatches) for e in found.estimates} == {(18, 1)}
    assert "reads histc" in lines[0]


def test_where_the_sequence_cannot_be_cut_tensor_parallelism_leaves_it_whole() -> None:
    """Two tokens are cut among two devices, but not among four."""
    graph = graph_of("gpt2:size=tiny,layers=1,seq=2,batch=4,device=meta")
    menu = Menu(graph, ss.Cluster.parse("a100:1x4"))
    whole, cut = (menu.costs(Use(4, layout, "none", "whole", 1)) for layout in ("tensor", "sequence"))
    assert whole is not None
    assert cut is None
    space = [Choice(4 // tp, tp, 1, tp, 1, layout="sequence") for tp in (2, 4)]
    assert [(c.tp, c.layout) for c in _uncut(menu, space, 4, ())] == [(2, "sequence"), (4, "tensor")]


def test_the_plans_of_an_answer_hold_and_fit() -> None:
    """Each is predicted as its text is; the first is equal to the model; the bound is below all."""
    graph, answer = graph_of(GPT), few()
    assert len(answer.plans) >= 3
    for found in answer.plans:
        again = ss.compile(graph, found.spec, "a100:1x2").simulate()
        assert (again.step_seconds, again.fits) == (found.prediction.step_seconds, True)
        assert answer.bound <= found.prediction.step_seconds
    seconds = [found.prediction.step_seconds for found in answer.plans]
    assert seconds == sorted(seconds)
    equal(graph_of(GPT, "SGD"), answer.best.spec)


@pytest.mark.parametrize(
    "way",
    [
        {"cuda_graph": True},
        *slow({"torch_compile": True, "cuda_graph": True}, {"fused": True, "attention": "flash1"}),
    ],
)
def test_plans_are_found_by_steps_as_they_run(way: dict[str, Any]) -> None:
    """Each is predicted as its text is, with the same options; the bound is below all."""
    graph, where = graph_of(GPT), f"{FEW}, no pp, no zero, tp = 1"
    answer = ss.search(graph, "a100:1x2", where=where, system=ss.System(**way))
    for found in answer.plans:
        plan, step = ss.compile(graph, found.spec, "a100:1x2"), found.prediction.step_seconds
        assert plan.simulate(system=ss.System(**way)) == found.prediction
        # Fused kernels start as late in a small model as others.
        assert answer.bound <= step < (0.9 if "cuda_graph" in way else 1.0) * plan.simulate().step_seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "where", "term", "memory"),
    [
        # Scores take most of the memory, but not those of a part of the tokens.
        (
            "gpt2:layers=2,hidden=256,heads=4,seq=1024,vocab=50304,batch=8,device=meta",
            "pp = 1",
            "chunked_loss",
            2_200_000_000,
        ),
        ("mixtral:size=tiny,batch=8,device=meta", "no pp", "expert_parallel", None),
    ],
)
def test_plans_beyond_megatrons_are_found_where_they_are_better(
    model: str, where: str, term: str, memory: int | None
) -> None:
    """Others do not fit into the memory, or have longer steps."""
    graph, cluster = graph_of(model), ss.Cluster.parse("a100:1x2")
    usual = search(graph, cluster, memory, where=f"{where}, no chunked, no experts, no swap, no co_shard").best
    best = search(graph, cluster, memory, where=where).best
    assert term in best.spec
    assert best.prediction.fits
    assert not usual.prediction.fits or best.prediction.step_seconds < usual.prediction.step_seconds


@pytest.mark.parametrize(
    "choice",
    [
        Choice(
            1,
            2,
            2,
            4,
            2,
            layout="sequence",
            recompute="full",
            schedule="zb_h1",
            blocks=(3, 1),
            own=(Own(1, 2, "full"), Own(2, 1, "none")),
        ),
        *slow(
            Choice(1, 2, 2, 2, 4, schedule="zbv", chunks=2, blocks=(1, 1, 1, 1)),
            Choice(1, 2, 2, 2, 2, layout="ulysses", loss="chunked"),
            Choice(2, 1, 2, 1, 4, schedule="ordered", order="F(FB)B/(FB)", own=(Own(2, 1, "none"), Own(1, 2, "full"))),
            Choice(2, 1, 2, 2, 2, schedule="interlaced", recompute="full"),
            Choice(2, 1, 2, 2, 2, schedule="chimera", recompute="full"),
            Choice(2, 2, 1, 1, 2, layout="ring", zero=3, recompute="full"),
            Choice(2, 1, 1, 2, 2, recompute="co_shard", swap="optimizer"),
            Choice(1, 1, 4, 1, 8, recompute="co_shard", blocks=(1, 1, 1, 1)),
        ),
    ],
    ids=lambda choice: choice.spec,
)
def test_a_choice_is_the_plan_that_its_text_names(choice: Choice) -> None:
    """It is compiled for its devices and its batch, and equals the model."""
    count = choice.dp * choice.tp * choice.pp
    equal(graph_of(GPT, "SGD"), choice.spec, count)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "dap"])
def test_plans_of_models_with_several_passes_recompute_and_cut_two_axes(layout: str) -> None:
    choice = Choice(1, 2 if layout == "dap" else 1, 2, 2, 4, layout=layout, recompute="full", schedule="3f1b")
    cluster = ss.Cluster.parse(f"a100:1x{choice.pp * choice.tp}")
    assert choice in set(choices(cluster, 8, 2, layouts=["tensor", "dap"]))
    assert ss.compile(graph_of(FOLDED), choice.spec, f"local:{choice.pp * choice.tp}").verify()["equal"]


@pytest.mark.parametrize(("model", "has_axes"), [(GPT, False), *slow((FOLDED, True))])
def test_only_models_of_two_axes_are_cut_along_them(model: str, has_axes: bool) -> None:
    cluster = ss.Cluster.parse("a100:1x2")
    assert ("dap" in _layouts(Menu(graph_of(model), cluster), cluster)) == has_axes


def test_random_constraints_leave_plans_that_satisfy_them_or_are_refused() -> None:
    space, drawn = list(choices(ss.Cluster.parse("a100:1x4"), 8, 8, layouts=["sequence"])), random.Random(0)
    refused = list[tuple[str, str]]()
    for _ in range(100):
        name = drawn.choice([*NUMBERS, *WORDS])
        values = WORDS.get(name, (0, 1, 2, 3, 4, 8, 64))
        sign, value = drawn.choice(["=", "!="] + ["<=", "<", ">", ">="] * (name in NUMBERS)), drawn.choice(values)
        text = f"{name} {sign} {value}"
        try:
            found = left(space, read(text))
        except InputError as error:
            refused.append((text, str(error)))
            continue
        python = {"=": "=="}.get(sign, sign)
        assert found
        assert all(eval(f"have {python} want", {"have": getattr(c, name), "want": value}) for c in found)
    assert 5 < len(refused) < 50
    assert all(text in error for text, error in refused)


@pytest.mark.slow
def test_a_plan_that_does_not_hold_is_no_bound_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its estimate is none of the answer's; plans that save memory in its place are looked at."""
    refused, real = set[Choice](), programs.predicted

    def predicted(*given: Any) -> Any:
        choice = given[4]
        if choice.savings or choice.pp > 1:
            return real(*given)
        refused.add(choice)
        raise ss.PlanError("this plan does not hold.")

    monkeypatch.setattr(programs, "predicted", predicted)
    answer = search(graph_of(GPT), "a100:1x2", where="rows = 4, pp = 1, tp = 2, no selective, no ulysses, no ring")
    assert refused
    assert refused.isdisjoint(e.choice for e in answer.estimates)
    assert answer.best.choice.savings


def _estimate(bound: float, **decided: Any) -> Estimate:
    return Estimate(Choice(**{"dp": 1, "tp": 1, "pp": 1, "rows": 1, "microbatches": 1, **decided}), 1.0, 1.0, bound)


@pytest.mark.parametrize(
    ("bounds", "compiled"),
    [
        # The lowest first, until the bound is close to the best step, of one second.
        ([0.9, 0.8, 0.96], [0.8, 0.9]),
        ([0.96, 0.99], []),
        ([0.7, 0.71, 0.72, 0.73, 0.74], [0.7, 0.71, 0.72, 0.73]),
    ],
)
def test_plans_of_low_bounds_are_compiled_whole(bounds: list[float], compiled: list[float]) -> None:
    """A plan whose stages could have other blocks, and that fits, stays a bound: it ends this."""
    best = next(iter(few().plans))
    one = replace(best, choice=_estimate(0.0).choice, prediction=replace(best.prediction, step_seconds=1.0))
    waiting = {e.choice: e for n, bound in enumerate(bounds) if (e := _estimate(bound, chunks=n + 2))}
    tried = list[float]()

    class Compiled(Programs):
        def compiled(self, choice: Choice, certified: bool = False) -> Found | None:
            tried.append(known[choice].bound)
            return one

    known, found = dict(waiting), Compiled(graph_of(GPT), ss.Cluster.parse("a100:1x2"), None, PLAIN, found=[one])
    assert len(list(_proofs(waiting, inf, Errors(), found, lambda e: True))) == len(compiled)
    assert tried == compiled
    other = _estimate(0.5, pp=2, blocks=(2, 2))
    known[other.choice] = other
    assert not list(_proofs({**known}, inf, Errors(), found, lambda e: True))
    assert len(list(_proofs({other.choice: other}, inf, Errors(), found, lambda e: False))) == 1


def test_the_plans_to_measure_are_of_several_families() -> None:
    """The best of each family that is near; the next best."""
    some = [
        _estimate(0.0, dp=4), _estimate(0.0, dp=4, microbatches=2), _estimate(0.0, dp=4, zero=1), _estimate(0.0, pp=4),
        _estimate(0.0, dp=4, zero=3), _estimate(0.0, pp=4, schedule="zb_h1"), _estimate(0.0, tp=4),
    ]  # fmt: skip
    pairs = zip(some, (1.0, 1.01, 1.02, 1.05, 1.1, 1.14, 1.2), strict=True)
    ranked = [e._replace(seconds=seconds * e.choice.batch) for e, seconds in pairs]
    places = [[ranked.index(e) for e in finalists(ranked, count)] for count in (1, 2, 4, 5, 6)]
    assert places == [[0], [0, 3], [0, 3, 4, 5], [0, 1, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert finalists(ranked, 9) == ranked
    # Three of the family of a finalist, and of as many others, are compiled whole, if they are near.
    whole = [replace(few().plans[0], choice=e.choice, spec=e.choice.spec) for e in ranked]
    steps = [replace(f.prediction, step_seconds=e.seconds) for f, e in zip(whole, ranked, strict=True)]
    found = [replace(f, prediction=step) for f, step in zip(whole, steps, strict=True)]
    tried = [next_finalist([*found[:n], *ranked[n:]], 1) for n in range(5)]
    assert tried == [*(e.choice for e in ranked[:4]), None]
    assert next_finalist([found[0], *ranked[1:]], 2) == ranked[3].choice


def test_plans_that_are_measured_are_compiled_whole() -> None:
    """Those of other families, too, and as many as are asked for."""
    usual, found = few(), search(graph_of(GPT), "a100:1x2", where=FEW, measured=6)
    assert len(usual.plans) < 6 <= len(found.plans)
    assert found.best == usual.best
    assert len(found.finalists(6)) == 6
    assert len({(f.choice.tp, f.choice.pp > 1 and f.choice.schedule) for f in found.finalists(6)}) > 2


def test_a_loss_in_parts_that_few_rows_do_not_have_is_found() -> None:
    """Blocks are measured with four rows, which cannot be in eight parts."""
    found = search(
        graph_of(GPT), "a100:1x2", where="loss = chunked, layout = sequence, tp = 2, rows >= 4, no recompute"
    )
    assert found.best.choice.rows == 8
    assert found.best.prediction.fits


def test_few_plans_are_compiled_whole_where_none_nearly_fits() -> None:
    found = search(graph_of(GPT), "a100:1x2", 10**6, where=f"{FEW}, no pp, tp = 1")
    assert len(found.plans) == 3 < len(found.estimates)
    assert not found.best.prediction.fits


@pytest.mark.slow
def test_what_saves_memory_is_measured_only_where_no_plainer_plan_fits() -> None:
    """Beside the best plan, only what differs in recomputation is, so that it has a reason. Little memory is another
    matter.
    """
    best, *_ = (answer := search(graph_of(GPT), "a100:1x2", where="pp = 1, no zero")).plans
    others = {e.choice for e in answer.estimates if e.choice.savings}
    assert best.choice.savings == 0
    assert others
    assert all(replace(c, recompute="none") == best.choice for c in others)
    tight = search(graph_of(GPT), "a100:1x2", best.prediction.fullest.peak_bytes - 1, where="pp = 1, no zero")
    assert {e.choice.recompute for e in tight.estimates if e.choice.tp == 1} > {"none", "full"}
    assert tight.best.prediction.fits


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_plans_satisfy_random_constraints() -> None:
    """200 pairs of constraints: each has a plan that satisfies both and fits, or is refused in words."""
    drawn, python, refused = random.Random(1), {"=": "=="}, 0
    every = choices(ss.Cluster.parse("a100:1x4"), 8, 4, layouts=["sequence"])
    # The model has one pass.
    space = [c for c in every if c.schedule != "3f1b"]
    for _ in range(200):
        clauses = list[tuple[str, str, object]]()
        for name in drawn.sample([*NUMBERS, *WORDS], 2):
            values = WORDS.get(name, (0, 1, 2, 3, 4))
            signs = ["=", "!="] + ["<=", "<", ">", ">="] * (name in NUMBERS)
            clauses.append((name, drawn.choice(signs), drawn.choice(values)))
        where = ", ".join(f"{name} {sign} {value}" for name, sign, value in clauses)
        try:
            left(space, read(where))
        except InputError:
            refused += 1
            with pytest.raises(InputError, match="no plan of the space"):
                search(graph_of(GPT), "a100:1x4", where=where)
            continue
        answer = search(graph_of(GPT), "a100:1x4", where=where, seconds=1e-9)
        assert answer.best.prediction.fits
        for plan, (name, sign, value) in product(answer.plans, clauses):
            have = {"have": getattr(plan.choice, name), "want": value}
            assert eval(f"have {python.get(sign, sign)} want", have), (where, plan.spec)
    assert 20 < refused < 180


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tp <= many", "tp is a number, not many"),
        ("tp", "'tp' is no constraint"),
        ("cats = 2", "decision 'cats'"),
        ("schedule < 1f1b", "schedule has names"),
        ("recompute = some", "recompute 'some'"),
        ("no cats", "decision 'cats'"),
        ("tp > 64", "no plan of the space satisfies 'tp > 64'; tp is one of 1, 2"),
        ("tp = 2, pp = 2", "satisfies 'tp = 2, pp = 2' together"),
        ("schedule = 3f1b", "satisfies 'schedule = 3f1b'; schedule is one of"),
        ("stage 0 has 3 blocks, stage 1 has 3 blocks", "stage 1 has 3 blocks' together"),
    ],
)
def test_a_constraint_that_holds_nowhere_is_refused(text: str, why: str) -> None:
    with pytest.raises(InputError, match=why.replace("(", r"\(")):
        search(graph_of(GPT), "a100:1x2", where=text)


def test_the_command_prints_and_writes_a_plan_to_own(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The file is for the batch that was chosen, with the command that compiles it."""
    file = tmp_path / "own.py"
    given = ["search", GPT, "--cluster", "a100:1x2", "--where", f"{ONE}, layout = sequence", "--batch", "4"]
    given += ["--precision", "fp32"]
    more = ["--why-not", "zero:2,stage=3", "--why-not", "tensor_parallel:3 x data_parallel"]
    assert run(*given, *more, "--out", file, "--json") == 0
    found = json.loads(capfd.readouterr().out)
    resolve(found["plan"])
    assert found["bound"] <= found["plans"][found["plan"]]["step_seconds"]
    assert "its step takes" in found["why_not"]["zero:2,stage=3"]
    assert "it does not hold" in found["why_not"]["tensor_parallel:3 x data_parallel"]
    model, own = GPT.replace("batch=8", "batch=4"), dict[str, Any]()
    exec(file.read_text(), own)
    assert own["PLAN"] == found["plan"]
    compiled = f"superscaler compile {model} --plan {file} --cluster a100:1x2 --precision fp32 --out own"
    assert f"\n    {compiled}\n" in own["__doc__"]
    assert f"what holds it back: {found['held_back']}\n" in own["__doc__"]
    assert run(*given, "--memory", "1MB", "--top", "1") == 1
    assert "no plan of the space fits" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--cluster", "local:2"], "nothing is known about the speed of local:2"),
        (["--cluster", "a100:1x2", "--top", "0"], "--top 0"),
        (["--cluster", "a100:1x2", "--why-not", "nosuch"], "unknown plan 'nosuch'"),
        (["--cluster", "a100:1x2", "--seconds", "-1"], "--seconds -1.0"),
        (["--cluster", "a100:1x2", "--attention", "flash9"], "unknown attention 'flash9'"),
        (["--cluster", "a100:1x2", "--balance", "2"], "the model has no mixture of experts"),
        (["--cluster", "a100:1x2", "--where", "tp ~ 3"], "'tp ~ 3' is no constraint"),
    ],
)
def test_wrong_input_is_one_line(options: list[str], why: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("search", GPT, *options) == 2
    assert why in capfd.readouterr().err


Asked = list[tuple[object, ...]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Return the searches for `auto`: the model, the cluster, the memory and the system of each; all find the same."""
    found, best = Asked(), few()

    def searched(graph: ss.Graph, cluster: ss.Cluster, memory: int | None, system: System, is_kept: bool) -> Answer:
        assert not is_kept
        found.append((graph.model, str(cluster), memory, system))
        return best

    monkeypatch.setattr("superscaler.planner.search.search", searched)
    return found


def test_auto_is_the_plan_of_a_search(caplog: pytest.LogCaptureFixture, asked: Asked) -> None:
    graph, best = graph_of(GPT), few().best
    plan = ss.compile(graph, "auto", "a100:1x2")
    assert asked == [(graph.model, "a100:1x2", None, System())]
    assert best.spec in caplog.text
    assert plan.simulate() == best.prediction


def test_auto_is_searched_as_its_steps_run(capfd: pytest.CaptureFixture[str], asked: Asked) -> None:
    """With the memory and the options of a prediction."""
    given = ["simulate", GPT, "--plan", "auto", "--cluster", "a100:1x2", "--memory", "40GB", "--cuda-graph"]
    found, _ = answer(capfd, *given)
    ((_, *others),) = asked
    assert others == ["a100:1x2", 40 * 10**9, System(cuda_graph=True)]
    assert found["capacity"] == 40 * 10**9


@pytest.mark.parametrize("command", ["compile", "train", "verify", "validate", "simulate"])
def test_auto_on_devices_of_unknown_speed_is_refused_before_the_capture(
    command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("superscaler.cli.common.ModelRequest.capture", lambda self: pytest.fail("it is captured"))
    assert run(command, GPT, "--plan", "auto", "--cluster", "local:2") == 2
    err = capfd.readouterr().err
    assert "error: --cluster local:2: nothing is known about the speed" in err
    assert "doctor --measure" in err


@pytest.mark.parametrize("spec", ["auto:dp=2", "auto x tensor_parallel", "auto:2 x tensor_parallel"])
def test_auto_stands_alone(spec: str) -> None:
    with pytest.raises(InputError, match=f"'{spec.partition(' ')[0]}': auto is the plan that a search finds"):
        ss.compile(graph_of(GPT), spec, "a100:1x2")


def test_ctrl_c_gives_the_best_so_far() -> None:
    """Before the first plan, and in a search for `auto`, it ends the search."""
    graph, cluster = graph_of(GPT), ss.Cluster.parse("a100:1x2")

    def interrupting(words: str) -> Callable[[str], None]:
        def note(line: str) -> None:
            if words in line:
                raise KeyboardInterrupt

        return note

    (found,) = (answer := search(graph, "a100:1x2", where=ONE, note=interrupting(": step "))).plans
    assert ss.compile(graph, found.spec, cluster).simulate() == found.prediction
    assert answer.bound <= found.prediction.step_seconds
    for words, is_kept in (("measuring", True), (": step ", False)):
        with pytest.raises(KeyboardInterrupt):
            search(graph, cluster, where=ONE, note=interrupting(words), is_kept=is_kept)


def test_a_search_simulates_few_small_models_and_records_each_segment_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """These are most of the time of a search: for the one way to use devices that the constraints leave, models with
    one block and with two, of one row and of four.
    """
    counts = Counter[str]()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return run

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for known in ("_RECORDED", "_KERNELS"):
        monkeypatch.setattr(segments, known, {})
    monkeypatch.setattr(menus, "simulate", counted("small models", menus.simulate))
    monkeypatch.setattr(wholes, "simulate", counted("whole plans", wholes.simulate))
    monkeypatch.setattr(Recorder, "segment", counted("segments", Recorder.segment))
    search(graph_of(GPT), "a100:1x2", where=f"{FEW}, tp = 1, no pp")
    assert counts == {"small models": 2 * 2, "whole plans": 2, "segments": 27}
