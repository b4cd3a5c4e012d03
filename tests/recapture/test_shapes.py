"""One step with programs for several shapes trains what the module trains on each batch as it is."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import InputError, PlanError
from superscaler.frontend.base.training import named_optimizer
from superscaler.models import build
from superscaler.recapture.shapes import Shape
from superscaler.runtime.load import load
from superscaler.runtime.step import Step
from superscaler.store.plan import shapes_in
from superscaler.train.feed import fitting
from superscaler.verify.plan_dir import validate_directory
from tests.helpers.commands import answer, run
from tests.helpers.lengths import Batch, Programs, Trained, eager
from tests.helpers.ran import Around, captured
from tests.helpers.replays import Emulator, on_recorders
from tests.helpers.sweeps import few

CLIP = 0.7
TOLERANCE = 1e-9
LENGTHS = [20, 8, 16, 8, 20]


def drawn(seed: int, **shapes: tuple[int, ...]) -> Batch:
    """Return a batch of these shapes, whose first rows count fewer labels."""
    draw = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        is_image = name == "pixel_values"
        high = 10 if len(shape) == 1 else 300
        found[name] = torch.randn(shape, generator=draw) if is_image else torch.randint(high, shape, generator=draw)
    labels = found["labels"]
    labels[: len(labels) // 2, : labels.shape[-1] // 2] = -100
    return found


def text(length: int, seed: int, rows: int = 8, target: int = 0) -> Batch:
    return drawn(seed, input_ids=(rows, length), labels=(rows, target or length))


class Case:
    """A model, the shapes that are listed beside that of its capture, a stream of batches, and the lengths that hold
    these.
    """

    def __init__(self, name: str, shapes: list[Shape], batches: list[Batch], lengths: list[int]) -> None:
        self.shapes, self.batches, self.held = shapes, batches, [(8, length) for length in lengths]
        built = build(name)
        optimizer = torch.optim.SGD(built.module.parameters(), lr=0.1, momentum=0.9)
        self.graph = ss.capture(built.module, kwargs=built.kwargs, optimizer=optimizer)
        self.expected: Trained = eager(self.graph, batches, CLIP)


@cache
def case(name: str) -> Case:
    """Return a case. The batches of the first one are filled but for three; a router's loss and an encoder's attention
    read all elements, so that the shapes of others are all listed.
    """
    match name:
        case "gpt2":
            stream = [text(32, 0), text(16, 1), text(24, 2), text(12, 3), text(32, 4, rows=5), text(16, 5)]
            return Case("gpt2:size=tiny", [16, 24], stream, [32, 16, 24, 16, 32, 16])
        case "mixtral":
            return Case("mixtral:size=tiny", [8, 16], [text(n, k) for k, n in enumerate(LENGTHS)], LENGTHS)
        case "t5":
            sizes = {20: 12, 12: 8, 16: 4}
            shapes: list[Shape] = [{"input_ids": (8, n), "labels": (8, m)} for n, m in sizes.items()]
            stream = [text(n, k, target=sizes[n]) for k, n in enumerate((20, 12, 16, 12, 20))]
            return Case("t5:size=tiny", shapes, stream, [20, 12, 16, 12, 20])
        case "bert":
            return Case("bert:size=tiny", [8, 16], [text(n, k) for k, n in enumerate(LENGTHS)], LENGTHS)
    raise AssertionError(name)


# Each with its devices; those of pipelines and of accumulation with their microbatches.
PLANS = [
    ("zero:stage=3", 2), ("data_parallel", 2), ("zero:stage=1", 2), ("tensor_parallel", 2), ("sequence_parallel", 2),
    ("ulysses", 2), ("ring_attention", 2), ("pipeline_1f1b:microbatches=2", 2),
    ("hybrid:dp=2,tp=2,pp=1,microbatches=2,recompute=full", 4), ("hybrid:dp=1,tp=2,pp=2,microbatches=2,zero=1", 4),
]  # fmt: skip
MODELS = ["gpt2", "mixtral", "t5", "bert"]
# Its router's loss is over all microbatches, and the position biases of t5 have gradients, which rings refuse.
REFUSED = {("mixtral", plan) for plan, _ in PLANS if "microbatches" in plan} | {("t5", "ring_attention")}
ROWS = [(m, p, n) for m in MODELS for p, n in PLANS if (m, p) not in REFUSED]


@pytest.mark.parametrize(("model", "plan", "world"), few(ROWS, 0, 7))
def test_lengths_that_vary_train_as_the_module_does(model: str, plan: str, world: int) -> None:
    found = case(model)
    for rank in Programs(found.graph, plan, world, found.shapes).trained(found.batches, CLIP):
        assert rank.gap(found.expected) < TOLERANCE
        assert [ran["input_ids"] for ran in rank.ran] == found.held


def test_a_run_of_several_lengths_goes_on_on_fewer_devices(tmp_path: Path) -> None:
    found = case("gpt2")
    first = Programs(found.graph, "zero:stage=3", 2, found.shapes)
    before = first.trained(found.batches[:3], CLIP, end=tmp_path)[0]
    (after,) = Programs(found.graph, "single", 1, found.shapes).trained(found.batches[3:], CLIP, start=tmp_path)
    whole = after._replace(losses=before.losses + after.losses, norms=before.norms + after.norms)
    assert whole.gap(found.expected) < TOLERANCE


class Small(nn.Module):
    """A mean over positions, which no filling leaves alone, and a constant of each length."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        places = torch.arange(x.shape[1]) / x.shape[1]
        scores = self.last((self.table(x) * places[:, None]).mean(1))
        return {"loss": nn.functional.cross_entropy(scores, y), "scores": scores}


def given(length: int, rows: int = 4) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(length)
    return {"x": torch.randint(9, (rows, length), generator=draw), "y": torch.randint(3, (rows,), generator=draw)}


def graph_of(module: nn.Module) -> ss.Graph:
    return ss.capture(module, (), given(8), torch.optim.AdamW(module.parameters(), lr=0.05), check=False)


def test_a_saved_plan_has_all_shapes_and_evaluates_them(tmp_path: Path) -> None:
    """Losses, and outputs in eval mode, are those of the module."""
    torch.manual_seed(0)
    module = Small()
    plan = ss.compile(graph_of(module), "single", "local:1", shapes=[(4, 12), 6, {"x": (2, 8), "y": (2,)}, 8, 6])
    assert plan.save(tmp_path)
    assert not plan.save(tmp_path)
    assert [folder.name for folder in shapes_in(tmp_path)] == ["0", "1", "2"]
    assert validate_directory(tmp_path)["deadlock_free"]
    step, optimizer = load(tmp_path), torch.optim.AdamW(module.parameters(), lr=0.05)
    for batch in (given(8), given(12), given(6), given(8, 2), given(12)):
        loss = module(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert float(step(batch)) == pytest.approx(float(loss.detach()), rel=1e-5)
        assert step.metrics()["samples"] == len(batch["x"])
    for batch in (given(6), given(12)):
        torch.testing.assert_close(step.infer(batch)["scores"], module(**batch)["scores"], rtol=1e-5, atol=1e-6)
    wanted = sum(float(module(**given(n))["loss"].detach()) for n in (6, 12)) / 2
    assert step.evaluate([given(6), given(12)])["loss"] == pytest.approx(wanted, rel=1e-5)
    assert ss.compile(graph_of(module), "single", "local:1", shapes=[12]).save(tmp_path)
    assert [folder.name for folder in shapes_in(tmp_path)] == ["0"]


def test_a_batch_that_no_shape_holds_is_refused_by_name(tmp_path: Path) -> None:
    plan = ss.compile(graph_of(Small()), "single", "local:1", shapes=[6])
    plan.save(tmp_path, evaluation=False)
    step = load(tmp_path)
    with pytest.raises(InputError) as refused:
        step(given(7))
    assert str(refused.value) == (
        "a batch has x (4, 7), y (4,), but this plan has programs for x (4, 6), y (4,); x (4, 8), y (4,), and none is "
        "filled from it; list its shape, too: ss.compile(..., shapes=[...])."
    )
    with pytest.raises(InputError, match=r"'x' is of torch\.int32"):
        step({**given(6), "x": given(6)["x"].int()})
    assert step.state.steps == 0


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([0], "a shape in shapes is 0; give a length (512), rows and a length"),
        (["long"], "a shape in shapes is 'long'; give a length"),
        (6, "shapes is a list, not 6; each of it is a length"),
        ([{"z": (4, 6)}], "unknown input 'z'"),
        ([{"x": (4,)}], "has 'x' as (4,), but the capture has it with the shape (4, 8); give 2 sizes above 0"),
    ],
)
def test_a_wrong_list_of_shapes_is_named(shapes: Any, message: str) -> None:
    with pytest.raises(InputError) as refused:
        ss.compile(graph_of(Small()), "single", "local:1", shapes=shapes)
    assert message in str(refused.value)


def test_a_length_of_inputs_with_two_lengths_asks_for_each() -> None:
    graph = captured(lambda: (Around(lambda m, a, b: m.t(a).sum() * m.t(b).sum(), t=nn.Embedding(9, 4)), PAIR))
    with pytest.raises(InputError, match=r"the length 6 in shapes is of no one dim of the inputs, .*\(4, 8\)"):
        ss.compile(graph, "single", "local:1", shapes=[6])


PAIR = (torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, 9, dtype=torch.int64))


def test_a_plan_that_keeps_weights_elsewhere_at_another_shape_is_refused() -> None:
    def moving(graph: ss.Graph, cluster: ss.Cluster) -> None:
        is_long = graph.model.tensors["x"].shape[1] > 6
        ss.op_assign(graph, graph.ops, cluster.devices[is_long])

    plan = ss.compile(graph_of(Small()), moving, "local:2", shapes=[6])
    with pytest.raises(PlanError, match=r"at the shape x \(4, 6\), y \(4,\) device 0 keeps last.bias, last.weight, ta"):
        plan.others  # noqa: B018


def test_ranks_that_are_given_other_shapes_are_named() -> None:
    programs = Programs(graph_of(Small()), "data_parallel", 2, [6])
    with pytest.raises(InputError, match=r"step 1 was given a batch for x \(4, 6\), y \(4,\) on rank 0 and for x"):
        programs.run(lambda step: step(given(8 if step.rank else 6)))


def test_a_batch_with_a_value_out_of_range_is_refused_at_its_shape(tmp_path: Path) -> None:
    ss.compile(graph_of(Small()), "single", "local:1", shapes=[6]).save(tmp_path, evaluation=False)
    with pytest.raises(InputError, match="'x' has 9, but the model has 9 rows for it"):
        load(tmp_path)({**given(6), "x": torch.full((4, 6), 9)})


class Tagged(nn.Module):
    """A tag for each position, which reads nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.last(self.table(x)).flatten(0, 1), y.flatten())


def test_data_of_several_lengths_is_filled_up_to_the_smallest_shape(tmp_path: Path) -> None:
    """Samples and batches train the module's own mean over their labels; what no shape holds is left out by name."""
    torch.manual_seed(0)
    module, draw = Tagged(), torch.Generator().manual_seed(1)
    example = {"x": torch.randint(9, (4, 12), generator=draw), "y": torch.randint(3, (4, 12), generator=draw)}
    graph = ss.capture(module, (), example, torch.optim.SGD(module.parameters(), lr=0.0))
    ss.compile(graph, "single", "local:1", shapes=[8, 6]).save(tmp_path, evaluation=False)
    samples = [{n: x[row, :length] for n, x in example.items()} for row, length in enumerate((5, 6, 8, 3))]
    step = load(tmp_path)
    batch = next(ss.batches(step, samples))
    assert batch["x"].shape == (4, 8)
    joined = {n: torch.cat([row[n] for row in samples])[None] for n in example}
    assert float(step(batch)) == pytest.approx(float(module(**joined).detach()), rel=1e-6)
    said = list[str]()
    given = [{n: x[:, :length] for n, x in example.items()} for length in (6, 5, 12, 7)]
    found = list(fitting([*given, {n: torch.cat([x, x], 1) for n, x in example.items()}], step.choice, said.append))
    assert [batch["x"].shape[1] for batch in found] == [6, 6, 12, 8]
    assert said == [
        "note: 1 of 5 batches are left out, with x of shape (4, 24), not (4, 12); pad them to use all, list their "
        "shape, or take another batch size (a plan has the shapes of its capture, and those listed beside it)"
    ]
    for batch in given:
        assert float(step(batch)) == pytest.approx(float(module(**batch).detach()), rel=1e-6)


MODEL = "gpt2:size=tiny,layers=1"


def test_a_mixture_of_lengths_is_the_mean_of_their_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """Each length is predicted as a model that is captured at it."""
    way = ["--plan", "data_parallel", "--cluster", "a100:1x2", "--precision", "fp32"]
    found, _ = answer(capsys, "simulate", MODEL, *way, "--lengths", "8:3,32:1")
    built, steps = build(f"{MODEL},device=meta"), {}
    for length in (8, 32):
        batch = {name: x[:, :length] for name, x in built.kwargs.items()}
        optimizer = named_optimizer("adamw", [*built.module.parameters()], 1e-3, ())
        graph = ss.capture(built.module, (), batch, optimizer, check=False)
        steps[length] = ss.compile(graph, "data_parallel", "a100:1x2").simulate()
    assert found["step_seconds"] == pytest.approx(0.75 * steps[8].step_seconds + 0.25 * steps[32].step_seconds)
    assert found["tokens_per_second"] == pytest.approx((0.75 * 64 + 0.25 * 256) / found["step_seconds"])
    assert found["peak_bytes"] == steps[32].fullest.peak_bytes > steps[8].fullest.peak_bytes
    assert found["lengths"]["8"]["share"] == 0.75
    assert run("simulate", MODEL, *way, "--lengths", "8:3", "--compare", "fsdp") == 2
    assert "leave one of them out" in capsys.readouterr().err


def test_steps_of_several_shapes_are_replayed() -> None:
    """Each shape has a recording of its own, over the same weights and states."""
    programs = Programs(graph_of(Small()), "zero:stage=3", 2, [6])

    def work(step: Step, recorder: Emulator | None) -> Any:
        step.choice.saved = lambda: programs.saved
        losses = [float(step({**given(8 - 2 * (k % 2)), "y": given(k + 1)["y"]}, clip=0.05)) for k in range(10)]
        return losses, {n: w.detach().clone() for n, w in step.state.weights.items()}, recorder

    found, expected = (on_recorders(programs.base, work, is_recorded) for is_recorded in (True, False))
    for (losses, weights, recorder), (theirs, others, _) in zip(found, expected, strict=True):
        assert losses == pytest.approx(theirs, rel=1e-12)
        torch.testing.assert_close(weights, others, rtol=1e-12, atol=1e-14)
        assert (len(recorder.recordings), recorder.replays > 0) == (2, True)


def test_a_graph_without_its_capture_is_compiled() -> None:
    """Models of another batch have no values, and no list of shapes."""
    small = ss.Graph(graph_of(Small()).model)
    assert ss.compile(small, "zero:stage=3", "local:2").compiled.program.world == 2


def test_the_plan_of_a_search_is_that_of_all_shapes() -> None:
    """A search at another shape may find another plan, whose weights rest elsewhere."""
    found = iter(["zero:2,stage=3", "data_parallel"])
    searched = "superscaler.planner.search.search"
    with patch(searched, lambda *_, **__: SimpleNamespace(best=SimpleNamespace(spec=next(found)))):
        plan = ss.compile(graph_of(Small()), "auto", "local:2", shapes=[6])
        (other,) = plan.others
    boxes = [sorted((w.tensor, w.box) for w in one.compiled.program.devices[0].weights) for one in (plan, other)]
    weights = [[pair for pair in some if pair[0] in ("table.weight", "last.weight")] for some in boxes]
    assert weights[0] == weights[1]
    assert next(found) == "data_parallel"
