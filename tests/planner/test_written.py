"""The answer as text: what holds the plan back, and the file that is written."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import superscaler as ss
from superscaler.cli.options.search import SearchOptions
from superscaler.cli.simulate import SearchRequest, _measured
from superscaler.cluster import LOCAL, PRESETS
from superscaler.planner.estimate import Estimate
from superscaler.planner.reasons import held_back, reasons
from superscaler.planner.search import Answer
from superscaler.planner.space import Choice, Own, choices
from superscaler.planner.whole.programs import Found
from superscaler.planner.written import text_of
from superscaler.simulate.prediction import DeviceTimes, Prediction
from tests.helpers.commands import answer, run
from tests.helpers.graphs import graph_of

TINY = "gpt2:size=tiny"
GB = 10**9


def times(devices: tuple[int, ...], peak: int, **parts: float) -> DeviceTimes:
    zero = dict.fromkeys(("compute", "host", "optimizer", "launch", "communication", "copies", "bubble"), 0.0)
    return DeviceTimes(devices=devices, **{**zero, **parts}, peak_bytes=peak, memory={}, peak_at="", largest=[],
                       kept={}, excess="")  # fmt: skip


def answered(choice: Choice, others: list[Estimate], **parts: float) -> Answer:
    """Return an answer with one plan of a step of 1 s, 0.5 s of which are the model's own products; its last devices
    are the fullest.
    """
    sizes = [own.dp * own.tp for own in choice.own] or [choice.dp * choice.tp] * choice.pp
    ends = [0, *accumulate(sizes)]
    stages = tuple(times(tuple(range(*pair)), (60 + k) * GB, **parts) for k, pair in enumerate(pairwise(ends)))
    p = Prediction(
        cluster="", precision="", step_seconds=1.0, low=1.0, high=1.0, samples=1, tokens=0, model_flops=0.0,
        peak_flops=0.0, bound=0.5, devices=stages, capacity=80 * GB, reserved=0, links={"server": 1.0, "network": 2.0},
    )  # fmt: skip
    mine = Estimate(choice, 1.0, 60.0 * GB, 0.9)
    return Answer([Found(choice.spec, choice, p)], 0.9, [mine, *others])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"compute": 0.9, "bubble": 0.1}, "compute (kernels below the speed of large products), 400 ms (40%)"),
        ({"compute": 0.9, "host": 0.3, "communication": 0.1}, "launches (devices wait for the host"),
        ({"compute": 0.6, "communication": 0.4}, "links (waits for communication, most of it by network), 400 ms"),
        ({"compute": 0.6, "bubble": 0.4}, "bubble (devices wait for other stages), 400 ms (40%) of the step"),
        ({"compute": 0.6, "optimizer": 0.4}, "updates of weights, 400 ms"),
        ({"compute": 0.6, "copies": 0.4}, "copies to and from the hosts, 400 ms"),
    ],
)
def test_the_largest_part_of_the_step_beside_products_holds_a_plan_back(parts: dict[str, float], words: str) -> None:
    choice = Choice(2, 1, 2, 1, 4, blocks=(2, 2))
    slower = Estimate(replace(choice, tp=2), 1.2, 90.0 * GB, 1.0)
    assert held_back(answered(choice, [slower], **parts)).startswith(words)


@pytest.mark.parametrize(
    ("choice", "where"),
    [
        (Choice(2, 1, 2, 1, 4, blocks=(2, 2)), "memory of stage 1: "),
        (Choice(2, 1, 2, 1, 4, schedule="interleaved", chunks=2), "memory of stages 1 and 3: "),
        (Choice(2, 1, 2, 1, 4, schedule="zbv", chunks=2, blocks=(1, 1, 1, 1)), "memory of stages 1 and 2: "),
        (Choice(2, 1, 4, 1, 4, schedule="chimera"), "memory of stages 0 and 3: "),
        (Choice(4, 1, 1, 1, 4), "memory: "),
        (Choice(6, 1, 2, 1, 4, own=(Own(6, 1, "none"), Own(1, 2, "full")), blocks=(3, 1)), "memory of stage 1: "),
    ],
)
def test_memory_holds_a_plan_back_if_a_faster_one_lacks_it(choice: Choice, where: str) -> None:
    faster = replace(choice, rows=8, microbatches=1)
    largest = Estimate(replace(choice, rows=16, microbatches=1), 0.1, 99.0 * GB, 1.0)
    smaller = Estimate(replace(choice, rows=4, microbatches=1), 0.96, 81.0 * GB, 1.0)
    found = held_back(answered(choice, [largest, smaller, Estimate(faster, 1.5, 95.0 * GB, 1.0)], compute=0.9))
    assert found == f"{where}{faster.spec} would take 25% less, but needs 95.0 GB of 80.0 GB"


def test_a_written_plan_is_the_found_one_with_a_reason_by_each_decision() -> None:
    """Drawn plans of a space, beside drawn others: the file's text, run as Python, is the plan's."""
    drawn = random.Random(0)
    space = list(choices(ss.Cluster.parse("a100:2x4"), 64, 12, layouts=["sequence", "experts"]))
    for choice in drawn.sample(space, 100):
        if choice.pp > 1 and not choice.is_even:
            choice = replace(choice, blocks=(1,) * choice.stages)
        others = [Estimate(c, 2.0 * c.batch / choice.batch, GB, 1.0) for c in drawn.sample(space, 9)]
        found = answered(choice, others, compute=0.9)
        text = text_of(
            found, 'A plan of """ C:\\models.', {"constraints": "tp <= 8", "steps": ""}, "superscaler compile"
        )
        file = dict[str, object]()
        exec(text, file)
        assert file["PLAN"] == choice.spec
        doc = str(file["__doc__"])
        assert 'A plan of """ C:\\models.' in doc
        assert "step 1 s; nothing in this space is below 900 ms (10% less at most)" in doc
        assert "constraints: tp <= 8" in doc
        assert "steps:" not in doc
        for name, reason in reasons(found).items():
            assert text.count(f"    # {name} {reason}\n") == 1


@pytest.mark.dist
def test_a_written_plan_is_trained_as_its_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By processes; its program is that of the text."""
    found, file = answered(Choice(2, 1, 1, 4, 1), [], compute=0.9), tmp_path / "plan.py"
    file.write_text(text_of(found, "A plan.", {}, "superscaler train"))
    given = ["--plan", file, "--cluster", "local:2", "--steps", 3, "--out", tmp_path / "ran"]
    ran, _ = answer(capfd, "train", TINY, *given)
    assert ran["world"] == 2
    assert ran["losses"][-1] < ran["losses"][0]
    ss.compile(graph_of(TINY), found.best.spec, "local:2").save(tmp_path / "text", evaluation=False)
    programs = [(tmp_path / name / "program.txt").read_text() for name in ("ran", "text")]
    assert programs[0] == programs[1]


def test_plans_are_measured_in_the_precision_in_which_they_were_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with GPUs takes 16-bit weights, as train does."""
    machine = ss.Cluster.of("machine", LOCAL, 1, 2, PRESETS[LOCAL].links, PRESETS["a100"].device)
    found = answered(Choice(2, 1, 1, 4, 1), [], compute=0.9)

    def measured(specs: list[str], save: Callable[[str, Path], object], *_: object) -> dict[str, float]:
        assert specs == [found.best.spec]
        save(specs[0], tmp_path / "plan")
        return {specs[0]: 1.0}

    monkeypatch.setattr("superscaler.planner.measured.measured", measured)
    request = SearchRequest(model=TINY, cluster=str(machine), no_check=True)
    assert _measured(request, machine, found, SearchOptions(measure=3)) == {found.best.spec: 1.0}
    weights = load_file(tmp_path / "plan" / "initial.safetensors")
    assert weights["transformer.h.0.mlp.c_fc.weight"].dtype == torch.bfloat16


def test_a_file_of_the_user_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "plan.py"
    mine.write_text("mine")
    refused = {mine: "is there, and stays as it is", tmp_path / "plan": "name it plan.py",
               tmp_path / "no" / "plan.py": "there is no folder"}  # fmt: skip
    for file, why in refused.items():
        assert run("search", TINY, "--cluster", "a100:1x2", "--out", file) == 2
        assert why in capfd.readouterr().err
    assert mine.read_text() == "mine"
    assert [*tmp_path.iterdir()] == [mine]
