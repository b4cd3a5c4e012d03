"""Segments as Inductor compiles them: losses and weights are those of plans without it, but for rounding."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import superscaler as ss
from superscaler.errors import RuntimeFailure
from superscaler.models import build
from superscaler.runtime import optimizer
from superscaler.runtime.compiled import inductor
from superscaler.runtime.compiled.segments import CompiledSegments
from superscaler.runtime.functions.draws import Draws, drawn
from superscaler.runtime.load import modules
from superscaler.runtime.step import Step
from superscaler.runtime.tapes import record
from tests.helpers.commands import answer
from tests.helpers.graphs import graph_of, step_of
from tests.helpers.ran import as_in, exact, on_ranks
from tests.helpers.sweeps import slow
from tests.runtime.test_replay import assert_replayed

# Plans of GPT-2 and their devices: the ways in which a tape is kept, dropped, moved, halved, or read in parts.
PLANS = {
    "single": 1, "recompute": 1, "co_shard:parts=2": 1, "tensor_parallel": 2, "zero:stage=3,keep=4": 2,
    "pipeline_1f1b:2,microbatches=4 x recompute": 2, "pipeline_1f1b:microbatches=8,offload=2": 4,
    "ulysses": 2, "zb_h1:2,microbatches=4": 2, "zbv:2,microbatches=4": 2, "hybrid:dp=2,tp=2": 4,
}  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.tanh(self.up(x)))).square().sum()


@cache
def net() -> ss.Graph:
    return step_of(Net(), torch.rand(6, 4), check=False)


class Plain:
    """A compiler that runs graphs operator by operator, and counts them: what is tested is all but Inductor."""

    graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, *_: Any) -> inductor.Call:
        self.graphs += 1
        return inductor.plain(graph)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Plain:
    counted = Plain()
    monkeypatch.setattr(inductor, "compiled", counted)
    return counted


def trained(graph: ss.Graph, plan: str, devices: int, is_compiled: bool, steps: int = 3) -> list[Any]:
    """Return the losses and the weights of each rank after some steps in float64."""
    compiled = exact(graph, plan, devices)
    compiled, batch = compiled.joined if is_compiled else compiled, as_in(compiled, graph.captured.batch)

    def work(step: Step) -> Any:
        step.state.compiled = CompiledSegments() if is_compiled else None
        losses = [step(batch).detach() for _ in range(steps)]
        return losses, {n: w.detach().clone() for n, w in step.state.weights.items()}

    return on_ranks(compiled, work)


def test_a_segment_is_compiled_once_and_trains_as_before(plain: Plain) -> None:
    graph = net()
    expected = trained(graph, "single", 1, is_compiled=False)
    assert plain.graphs == 0
    found = trained(graph, "single", 1, is_compiled=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    # One forward and one backward: later steps draw other numbers by the same graphs.
    assert plain.graphs == 2


class Layers(nn.Module):
    """A module whose layers have a norm: vectors beside matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU()) for _ in range(3))
        self.last = Net()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


@pytest.mark.parametrize(
    "plan", ["zb_h1:2,microbatches=2", *slow("zero:stage=3"), "pipeline_1f1b:2,microbatches=4,offload=2"]
)
def test_tapes_are_halved_gathered_again_and_moved_as_before(plan: str, plain: Plain) -> None:
    graph = step_of(Layers(), torch.rand(8, 4), check=False)
    expected = trained(graph, plan, 2, is_compiled=False)
    torch.testing.assert_close(trained(graph, plan, 2, is_compiled=True), expected, rtol=1e-12, atol=1e-12)
    assert plain.graphs


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("missing", [(True, False, False), (False, True, True), (False, False, True)])
def test_a_gradient_that_does_not_arrive_costs_no_operators(
    missing: Sequence[bool], split: bool, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only it reaches is neither computed nor added to a sum; the others are as they are by autograd."""
    built = list[torch.fx.GraphModule]()

    def keep(graph: torch.fx.GraphModule, *more: object) -> inductor.Call:
        built.append(graph)
        return inductor.plain(graph)

    def segment(x: Tensor, a: Tensor, b: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
        h = F.layer_norm(x @ a, (4,), norm).tanh()
        return h.sin() + 1, h @ b, (x @ b).softmax(-1)

    monkeypatch.setattr(inductor, "compiled", keep)
    given = [torch.rand(n, 4, dtype=torch.float64) for n in (3, 4, 4)] + [torch.rand(4, dtype=torch.float64)]
    arrived = [None if is_missing else torch.rand(3, 4, dtype=torch.float64) for is_missing in missing]

    def gradients(run: Any) -> list[Tensor | None]:
        _, tape = run(segment, given, {}, {}, {})
        sums: list[Tensor | None] = [torch.full_like(x, 7.0) for x in given[1:]]
        if split:
            return [*tape.first_half(arrived, [0]), *tape.second_half({0: sums}), *sums]
        return [*tape.backward(arrived, (), {1: sums}), *sums]

    expected = gradients(record)
    torch.testing.assert_close(gradients(CompiledSegments().record), expected)
    assert len(built) == 2 + split
    products = sum(n.target is torch.ops.aten.mm.default for graph in built[1:] for n in graph.graph.nodes)
    zeros = sum(n.target is torch.ops.aten.full.default for graph in built[1:] for n in graph.graph.nodes)
    # Of the products x a, h b, x b in turn, two each, and never one with zeros.
    assert (products, zeros) == ({(True, False, False): 6, (False, True, True): 2, (False, False, True): 4}[missing], 0)


@pytest.mark.parametrize("split", [False, True])
def test_a_sum_of_gradients_ends_where_compiled_code_has_read_it(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the list that compiled code empties holds it then: a new sum would be a second one in memory."""
    ended = list[bool]()

    def watched(graph: torch.fx.GraphModule, *_: object) -> inductor.Call:
        def run(given: list[Tensor]) -> Sequence[Any]:
            own = [x.clone() for x in given]
            last = [StorageWeakRef(x.untyped_storage()) for x in given[-2:]]
            given.clear()
            ended.append(all(x.expired() for x in last))
            return graph(*own)

        return run

    monkeypatch.setattr(inductor, "compiled", watched)
    given = [torch.rand(4, 4, dtype=torch.float64) for _ in range(3)]
    sums: list[Tensor | None] = [None, None]
    compiled = CompiledSegments()
    for _ in range(3):
        _, tape = compiled.record(lambda x, a, b: (x @ a @ b,), given, {}, {}, {})
        if split:
            tape.first_half([given[0]], [0])
        gone = tape.second_half({0: sums}) if split else tape.backward([given[0]], (), {1: sums})
        assert len(gone) == (not split)
    # The first call of a graph is compared with its operators, on the same tensors.
    assert ended[-1]
    x, a, b = given
    torch.testing.assert_close(sums, [3 * x.t() @ x @ b.t(), 3 * (x @ a).t() @ x])


@pytest.mark.slow
def test_compiled_segments_are_replayed(plain: Plain) -> None:
    def change(step: Step, number: int) -> None:
        step.state.compiled = step.state.compiled or CompiledSegments()

    assert_replayed(
        exact(step_of(Layers(), torch.rand(8, 4), check=False), "pipeline_1f1b:2,microbatches=4", 2), change=change
    )


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_gpt2_trains_as_before(plan: str, plain: Plain) -> None:
    graph = graph_of("gpt2:size=tiny,layers=4,batch=16,dropout=0.1")
    expected = trained(graph, plan, PLANS[plan], is_compiled=False)
    torch.testing.assert_close(trained(graph, plan, PLANS[plan], is_compiled=True), expected, rtol=1e-9, atol=1e-12)
    assert plain.graphs


MODELS = ("llama:size=tiny,layers=4,batch=8", "t5:size=tiny,batch=8", "vit:size=tiny,batch=8", "bert:size=tiny,batch=8")
OTHERS = {
    "single": 1, "recompute": 1, "co_shard:parts=2": 1, "swap:what=both": 1, "chunked_loss:parts=4": 1,
    "gradient_accumulation:microbatches=4": 1, "data_parallel": 2, "tensor_parallel": 2, "fsdp:recompute=true": 2,
    "zero:stage=2,microbatches=2": 2, "zb_h1": 2, "chimera": 2, "hybrid:dp=2,tp=2,zero=1": 4,
}  # fmt: skip
# Its gradients are summed over microbatches in the middle of the backward, which no order of pipelines allows.
REFUSED = [(MODELS[1], "chimera")]
# Of the llama alone: the others have no such attention, or two chains of layers.
OF_LLAMA = {"ring_attention": 2, "ulysses": 2, "sequence_parallel:regather=true": 2, "zbv": 2, "pipedream_2bw": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan"),
    [*((m, p) for m in MODELS for p in OTHERS if (m, p) not in REFUSED), *((MODELS[0], p) for p in OF_LLAMA)],
)
def test_other_models_train_as_before(model: str, plan: str, plain: Plain) -> None:
    graph, devices = graph_of(model), {**OTHERS, **OF_LLAMA}[plan]
    expected = trained(graph, plan, devices, is_compiled=False, steps=2)
    found = trained(graph, plan, devices, is_compiled=True, steps=2)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-11)
    assert plain.graphs


def losses(plan: str, devices: int, way: dict[str, str]) -> tuple[list[float], list[float]]:
    """Return five losses of GPT-2, compiled and uncompiled, in the dtypes that are trained."""
    built = build("gpt2:size=tiny,layers=4,batch=16,dropout=0.1")
    adam = torch.optim.AdamW(built.module.parameters(), lr=1e-3)
    graph = ss.capture(built.module, built.args, built.kwargs, adam, check=False, **way)
    compiled = ss.compile(graph, plan, f"local:{devices}")

    def work(step: Step, is_compiled: bool) -> list[float]:
        step.state.compiled = CompiledSegments() if is_compiled else None
        return [float(step(graph.captured.batch)) for _ in range(5)]

    found, expected = (on_ranks(compiled, partial(work, is_compiled=k))[0] for k in (True, False))
    return found, expected


WAYS = ({}, {"precision": "bf16"}, {"autocast": "bf16"})


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("plan", ["single", "recompute", "gradient_accumulation:microbatches=2"])
def test_inductor_trains_in_the_trained_dtypes_as_before(plan: str, way: dict[str, str]) -> None:
    """Nothing says that it runs uncompiled. Losses differ by the rounding of a step."""
    found, expected = losses(plan, 1, way)
    assert found == pytest.approx(expected, rel=1e-3 if way else 2e-6)
    assert found != expected


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("plan", [*PLANS, "chunked_loss:parts=4", "swap:what=both", "zero:stage=2,microbatches=2"])
def test_graphs_train_in_the_trained_dtypes_as_before(plan: str, way: dict[str, str], plain: Plain) -> None:
    found, expected = losses(plan, {**PLANS, **OTHERS}[plan], way)
    assert found == pytest.approx(expected, rel=1e-3 if way else 2e-6)
    assert plain.graphs


@pytest.mark.parametrize("plan", ["zero:stage=3", *slow("zb_h1:2,microbatches=2")])
def test_frozen_weights_and_two_optimizers_train_as_before(plan: str, plain: Plain) -> None:
    module = Layers()
    module.layers[1].requires_grad_(False)
    matrices = [x for x in module.parameters() if x.dim() > 1 and x.requires_grad]
    others = [x for x in module.parameters() if x.dim() < 2 and x.requires_grad]
    pair = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]
    graph = ss.capture(module, (torch.rand(8, 4),), optimizer=pair, check=False)
    expected = trained(graph, plan, 2, is_compiled=False)
    found = trained(graph, plan, 2, is_compiled=True)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert plain.graphs


@pytest.mark.slow
def test_experts_with_a_capacity_are_compiled(plain: Plain) -> None:
    """Each has rows for so many tokens, used or not. A segment that ran uncompiled would say so, which is an error."""
    graph, plan = graph_of("mixtral:size=tiny,layers=2,batch=8"), "expert_parallel:capacity=1.25"
    expected = trained(graph, plan, 2, is_compiled=False)
    torch.testing.assert_close(trained(graph, plan, 2, is_compiled=True), expected, rtol=1e-9, atol=1e-12)
    assert plain.graphs


@pytest.mark.parametrize("plan", ["single", pytest.param("expert_parallel", marks=pytest.mark.slow)])
def test_experts_without_a_capacity_are_compiled(plan: str, plain: Plain) -> None:
    """As many tokens as chose an expert go there; a segment that ran uncompiled would say so, which is an error."""
    graph, devices = graph_of("mixtral:size=tiny,layers=1,batch=2"), 1 + (plan != "single")
    expected = trained(graph, plan, devices, is_compiled=False)
    torch.testing.assert_close(trained(graph, plan, devices, is_compiled=True), expected, rtol=1e-10, atol=1e-12)
    assert plain.graphs


def test_what_is_of_a_shape_that_depends_on_data_runs_uncompiled() -> None:
    given = [torch.tensor([1.0, -2.0, 3.0]), torch.ones(3)]
    with pytest.warns(UserWarning, match=r"picked .*uncompiled: it cannot be traced \(DynamicOutputShapeException"):
        found, tape = CompiledSegments().record(picked, given, {}, {}, {})
    assert (found[0], *(g.tolist() for g in tape.backward([torch.ones(())], (), None))) == (4, [1, 0, 1], [1, 0, 3])


def picked(x: Tensor, weight: Tensor) -> tuple[Tensor]:
    return ((x * weight)[x > 0].sum(),)


def test_the_origin_of_a_loss_that_is_not_finite_is_named(plain: Plain) -> None:
    def work(step: Step) -> None:
        step.state.compiled = CompiledSegments()
        with pytest.raises(RuntimeFailure, match=r"comes from input x on rank 0, which has 1 of 24 elements"):
            step({"x": torch.rand(6, 4).put(torch.tensor(5), torch.tensor(torch.nan))}, check_finite=True)
        assert step.state.compiled is not None

    on_ranks(ss.compile(net(), "single", "local:1"), work)
    assert plain.graphs


def test_what_inductor_refuses_runs_uncompiled_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> inductor.Call:
        raise OSError("no compiler\nis there")

    graph = net()
    expected = trained(graph, "single", 1, is_compiled=False)
    monkeypatch.setattr(inductor, "compiled", fail)
    with pytest.warns(
        UserWarning, match=r"segment_1 .*uncompiled: Inductor refuses it \(OSError: no compiler\)"
    ) as said:
        torch.testing.assert_close(trained(graph, "single", 1, is_compiled=True), expected, rtol=1e-12, atol=1e-12)
    # Once for the forward, once for the backward, in three steps.
    assert len(said) == 2


@pytest.mark.parametrize("is_backward", [False, True])
def test_what_inductor_computes_wrongly_runs_uncompiled(is_backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call has other results than the operators; no step has them."""

    def wrong(graph: torch.fx.GraphModule, given: Sequence[Tensor], mode: object, of_backward: bool) -> inductor.Call:
        run = inductor.plain(graph)
        if of_backward is not is_backward:
            return run
        return lambda given: [x if x is None else x * 1.001 for x in run(given)]

    graph = net()
    expected = trained(graph, "single", 1, is_compiled=False)
    monkeypatch.setattr(inductor, "compiled", wrong)
    with pytest.warns(UserWarning, match=r"Inductor computes it wrongly \(the error of result 0 is 0.001, where"):
        torch.testing.assert_close(trained(graph, "single", 1, is_compiled=True), expected, rtol=1e-12, atol=1e-12)


def test_verify_runs_compiled_segments(plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ss.compile(net(), "data_parallel", "local:2")
    assert plan.verify()["equal"]
    assert not plain.graphs
    assert plan.verify(torch_compile=True)["equal"]
    assert plain.graphs

    def wrong(graph: torch.fx.GraphModule, *_: object) -> inductor.Call:
        run = inductor.plain(graph)
        return lambda given: [x if x is None or not x.is_floating_point() else x * 1.001 for x in run(given)]

    # Nothing is compared when it first runs.
    monkeypatch.setattr(inductor, "compiled", wrong)
    monkeypatch.setattr(inductor, "difference", lambda *_: "")
    found = plan.verify(torch_compile=True)
    assert not found["equal"]
    assert found["loss_error"] == pytest.approx(1e-3, rel=1)


class Fused(nn.Module):
    """A module whose forward and whose backward are a kernel each, beside their products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(4, 8, bias=False), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.up(x))).square().sum()


def test_inductor_trains_as_before() -> None:
    """Of torch's headers, which take most of the time, each kernel reads its own: a compiled header costs more."""
    graph = step_of(Fused(), torch.rand(6, 4), check=False)
    expected = trained(graph, "single", 1, is_compiled=False)
    with torch._inductor.config.patch(cpp_cache_precompile_headers=False):
        found = trained(graph, "single", 1, is_compiled=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_random_numbers_of_compiled_code_are_those_of_all_plans() -> None:
    whole, box = (5, 300, 40), ((1, 4), (0, 300), (7, 40))
    for seed, step in ((0, 0), (1 << 70, 77), (-3, 5)):
        entry = {"op": 3, "box": box, "extents": whole, "shape": [3, 300, 33], "ahead": 2}
        draws = Draws(seed, step, [entry, {**entry, "op": 4}], torch.device("cpu"))
        for k in range(2):
            assert torch.equal(drawn(draws.words(), k, draws.forms()[k]), draws(k))


@pytest.mark.parametrize("torch_compile", [False, True])
@pytest.mark.parametrize("foreach", [None, True])
def test_a_compiled_step_updates_by_one_fused_pass_where_the_user_leaves_it_open(
    foreach: bool | None, torch_compile: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Torch's kernel is made as far from the plain update as that of GPUs is."""
    updated = optimizer._updated

    def rounded(name: str, options: Any, *more: Any) -> list[Tensor]:
        return [x * (1 + 1e-5 * bool(options.get("fused"))) for x in updated(name, options, *more)]

    optimizer._agrees.cache_clear()
    monkeypatch.setattr(optimizer, "_updated", rounded)
    module = Net()
    adam = torch.optim.AdamW(module.parameters(), foreach=foreach)
    graph = ss.capture(module, (torch.rand(6, 4),), optimizer=adam, check=False)
    ss.compile(graph, "single", "local:1").save(tmp_path / "plan", evaluation=False)
    step = ss.load(tmp_path / "plan", torch_compile=torch_compile)
    optimizer._agrees.cache_clear()
    assert [bool(group["fused"]) for group in step.groups.here().values()] == [torch_compile and not foreach]


@pytest.mark.dist
@pytest.mark.slow
def test_processes_train_compiled_with_halves_of_backwards(capfd: pytest.CaptureFixture[str]) -> None:
    given = "mlp:layers=2,hidden=8", "--plan", "zb_h1:2,microbatches=2", "--cluster", "local:2", "--steps", "3"
    plain, _ = answer(capfd, "train", *given)
    found, said = answer(capfd, "train", *given, "--torch-compile")
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert "uncompiled" not in said


def test_code_has_its_source_where_its_folder_is_gone(tmp_path: Path) -> None:
    text = "def first(x):\n    return (x,)\n"
    made = modules({"segments.py": text}, f"{tmp_path}/gone/")["segments"]
    assert inspect.getsource(made.first) == text
