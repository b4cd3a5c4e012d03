"""Steps of many microbatches and blocks, from those of few."""

import pytest

import superscaler as ss
from superscaler.planner.kinds import runs
from superscaler.planner.space import Choice
from superscaler.planner.whole import lines as whole_plans
from superscaler.planner.whole.lines import predicted
from superscaler.planner.whole.programs import Programs
from superscaler.simulate.system import PLAIN
from tests.helpers.graphs import graph_of
from tests.helpers.sweeps import slow

# Work takes longer than the launches of its kernels.
MODEL = "gpt2:layers=2,hidden=1024,heads=16,seq=512,vocab=8192,batch=48,device=meta"
DEEP = "gpt2:layers=24,hidden=1024,heads=16,seq=512,batch=64,device=meta"
LESS_DEEP = "gpt2:layers=8,hidden=1024,heads=16,seq=512,vocab=8192,batch=32,device=meta"
DEEP_LLAMA = "llama:layers=25,hidden=1024,mlp=2048,heads=16,kv_heads=16,seq=512,batch=64,device=meta"


@pytest.mark.parametrize(
    "choice",
    [
        Choice(1, 2, 1, 4, 12),
        *slow(
            Choice(1, 1, 2, 2, 24),
            Choice(2, 1, 1, 2, 12, zero=3, recompute="full"),
            Choice(1, 1, 2, 2, 24, schedule="interleaved", chunks=2),
            Choice(1, 1, 2, 2, 24, schedule="interlaced", recompute="full"),
            Choice(1, 1, 2, 2, 24, schedule="zb_h1"),
            Choice(1, 1, 2, 2, 24, schedule="zbv", chunks=2, blocks=(1, 1, 1, 1)),
        ),
    ],
    ids=lambda choice: choice.spec,
)
def test_a_step_of_many_microbatches_is_on_the_line_through_those_of_few(choice: Choice) -> None:
    """Beside the plan that is compiled with all of them. Stages have two blocks."""
    model = MODEL.replace("layers=2", "layers=4") if choice.pp > 1 else MODEL
    graph, cluster = graph_of(model), ss.Cluster.parse("a100:1x2")
    found, program, _ = predicted(graph, cluster, None, PLAIN, choice)
    assert program is None
    whole = ss.compile(graph, choice.spec, cluster).simulate()
    assert found.step_seconds == pytest.approx(whole.step_seconds, rel=5e-3)
    assert found.fullest.peak_bytes == pytest.approx(whole.fullest.peak_bytes, rel=5e-3)
    assert found.model_flops == pytest.approx(whole.model_flops)
    assert (found.samples, found.tokens, found.capacity) == (whole.samples, whole.tokens, whole.capacity)
    for part in ("compute", "communication", "bubble", "optimizer"):
        assert found.mean(part) == pytest.approx(whole.mean(part), abs=1e-2 * whole.step_seconds)
    assert found.links == pytest.approx(whole.links)


def test_a_step_of_few_microbatches_is_compiled_with_all_of_them() -> None:
    graph, cluster, choice = graph_of(MODEL), ss.Cluster.parse("a100:1x2"), Choice(1, 1, 2, 3, 16)
    assert predicted(graph, cluster, None, PLAIN, choice)[0] == ss.compile(graph, choice.spec, cluster).simulate()


# Gathers before the middle, and what is gathered there, decide where the peak is; chunked losses end after all else.
WAYS = [
    (LESS_DEEP, Choice(4, 2, 1, 1, 2, "sequence")),
    *slow(
        (DEEP, Choice(4, 2, 1, 1, 2, "sequence")),
        (DEEP, Choice(8, 1, 1, 1, 2, zero=3)),
        (DEEP_LLAMA, Choice(8, 1, 1, 1, 2, zero=3)),
        (DEEP_LLAMA, Choice(4, 2, 1, 1, 2, "sequence")),
        *(
            (model, choice)
            for model in (DEEP, DEEP_LLAMA)
            for choice in (
                Choice(8, 1, 1, 1, 1),
                Choice(8, 1, 1, 1, 2, zero=1),
                Choice(8, 1, 1, 4, 1, zero=3),
                Choice(8, 1, 1, 1, 2, zero=3, recompute="full"),
                Choice(4, 2, 1, 1, 1),
                Choice(4, 2, 1, 2, 2, "ulysses"),
                Choice(8, 1, 1, 1, 1, recompute="selective"),
                Choice(8, 1, 1, 1, 2, zero=1, recompute="full"),
                Choice(8, 1, 1, 4, 1, recompute="co_shard"),
                Choice(8, 1, 1, 1, 1, loss="chunked"),
                Choice(8, 1, 1, 1, 16, zero=1),
            )
        ),
    ),
]


@pytest.mark.parametrize(("model", "choice"), WAYS, ids=str)
def test_a_model_of_many_blocks_is_on_the_line_through_two_of_few(
    monkeypatch: pytest.MonkeyPatch, model: str, choice: Choice
) -> None:
    """Beside the plan that is compiled with all of them. As many as in another test are enough for this."""
    monkeypatch.setattr(whole_plans, "_DEEP", 8)
    graph, cluster = graph_of(model), ss.Cluster.parse("a100:1x8")
    found, program, _ = predicted(graph, cluster, None, PLAIN, choice, runs=runs(graph))
    assert program is None
    whole = predicted(graph, cluster, None, PLAIN, choice).prediction
    assert found.step_seconds == pytest.approx(whole.step_seconds, rel=1e-3)
    assert found.fullest.peak_bytes == pytest.approx(whole.fullest.peak_bytes, rel=1e-3)
    for part in ("weights", "optimizer", "activations", "gathered", "overhead"):
        near = pytest.approx(whole.fullest.memory[part], abs=1e-3 * whole.fullest.peak_bytes)
        assert found.fullest.memory[part] == near, part
    assert found.model_flops == pytest.approx(whole.model_flops)
    for part in ("compute", "communication", "launch", "optimizer"):
        assert found.mean(part) == pytest.approx(whole.mean(part), abs=1e-3 * whole.step_seconds)
    assert found.links == pytest.approx(whole.links)


@pytest.mark.parametrize(
    ("model", "choice"),
    [
        # The runs are short.
        (MODEL, Choice(2, 1, 1, 4, 6)),
        *slow(
            # Devices wait for the host, from some block on.
            ("gpt2:layers=24,hidden=256,heads=8,seq=256,batch=64,device=meta", Choice(8, 1, 1, 1, 1)),
            (DEEP, Choice(8, 1, 1, 1, 1, swap="optimizer")),
        ),
    ],
    ids=str,
)
def test_other_models_are_compiled_with_all_blocks(model: str, choice: Choice) -> None:
    graph, cluster = graph_of(model), ss.Cluster.parse(f"a100:1x{choice.dp}")
    found, program, _ = predicted(graph, cluster, None, PLAIN, choice, runs=runs(graph))
    assert program is not None
    assert found == predicted(graph, cluster, None, PLAIN, choice)[0]


@pytest.mark.slow
def test_the_best_plan_on_a_line_is_compiled_with_all_blocks() -> None:
    """Then it has the figures of that, and a program."""
    graph, cluster, choice = graph_of(DEEP), ss.Cluster.parse("a100:1x8"), Choice(8, 1, 1, 4, 2, zero=3)
    programs = Programs(graph, cluster, None, PLAIN, runs(graph))
    assert programs.compiled(choice)
    assert programs.best is None
    programs.certify()
    assert programs.best is not None
    (best,) = programs.found
    assert best.prediction == ss.compile(graph, choice.spec, cluster).simulate()
