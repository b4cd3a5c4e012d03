"""Steps of many microbatches, from those of few."""

import pytest

import superscaler as ss
from superscaler.planner.space import Choice
from superscaler.planner.whole import predicted
from superscaler.simulate.system import PLAIN
from tests.helpers.graphs import graph_of
from tests.helpers.sweeps import slow

# Work takes longer than the launches of its kernels.
MODEL = "gpt2:layers=4,hidden=1024,heads=16,seq=512,vocab=8192,batch=48,device=meta"


@pytest.mark.parametrize(
    "choice",
    [
        Choice(1, 1, 2, 2, 24),
        *slow(
            Choice(1, 2, 1, 4, 12),
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
    """Beside the plan that is compiled with all of them."""
    graph, cluster = graph_of(MODEL), ss.Cluster.parse("a100:1x2")
    found, program = predicted(graph, cluster, None, PLAIN, choice)
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
