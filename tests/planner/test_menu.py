"""The menu: costs of blocks, which are kept on disk by what they depend on."""

from pathlib import Path

import pytest

import superscaler as ss
from superscaler.errors import InputError
from superscaler.planner import menu as menus
from superscaler.planner.kinds import of_batch
from superscaler.planner.menu import Menu
from superscaler.planner.space import Use
from superscaler.simulate.system import System
from superscaler.store import cache
from tests.helpers.graphs import graph_of
from tests.helpers.sweeps import slow

GPT = "gpt2:size=tiny,layers=4,batch=8"
# tests/planner/test_estimate.py has it, too.
LARGE = "gpt2:layers=8,hidden=1024,heads=16,seq=512,vocab=256,batch=16,device=meta"
USE = Use(2, "sequence", "none", "whole", 1)


def menu_of(model: str, cluster: str) -> Menu:
    return Menu(graph_of(model), ss.Cluster.parse(cluster))


def test_costs_are_measured_once_for_all_sizes_of_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other devices, compiled steps, and a damaged entry are measured anew."""
    # Captured with the cache of all tests.
    graph_of(GPT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    first = menu_of(GPT, "a100:1x2")
    few = first.costs(USE)
    first.keep()
    with monkeypatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path))
        many = menu_of(GPT, "a100:4x2").costs(USE)
        assert many is not None

    def refused(*_: object, **__: object) -> None:
        raise InputError("nothing is compiled here")

    with monkeypatch.context() as patched:
        patched.setattr(menus, "compile_graph", refused)
        assert menu_of(GPT, "a100:1x2").costs(USE) == few
        assert menu_of(GPT, "a100:4x2").costs(USE) == many
        assert menu_of(GPT, "h100:1x2").costs(USE) is None
        for system in (System(torch_compile=True), System(cuda_graph=True), System(attention="flash1")):
            assert Menu(graph_of(GPT), ss.Cluster.parse("a100:1x2"), system).costs(USE) is None
        (cache.folder() / first.key).write_bytes(b"damaged")
        assert menu_of(GPT, "a100:1x2").costs(USE) is None


def test_costs_add_up_to_the_step_of_the_model() -> None:
    """Those of each block and of the rest, of a microbatch that is alone."""
    costs = menu_of(GPT, "a100:1x2").costs(USE)
    assert costs is not None
    plan = ss.compile(of_batch(graph_of(GPT), 1), "hybrid:dp=1,tp=2,pp=1,microbatches=1,sequence=true", "a100:1x2")
    total = costs.rest.plus(costs.runs[0], 4)
    assert total.seconds + total.idle + total.once + total.update == pytest.approx(
        plan.simulate().step_seconds, rel=0.01
    )


@pytest.mark.parametrize("recompute", ["full", *slow("co_shard")])
@pytest.mark.parametrize("layout", ["tensor", *slow("sequence")])
def test_a_recomputed_block_keeps_its_input_alone(recompute: str, layout: str) -> None:
    """What is gathered again inside of it, and what its parts read, exists for a moment."""
    # Two devices have four heads each, one a part.
    costs = menu_of(GPT if recompute == "full" else f"{GPT},heads=8", "a100:1x2").costs(
        Use(2, layout, recompute, "whole", 1)
    )
    assert costs is not None
    assert costs.runs[0].kept == 32 * 64 * 4 / (2 if layout == "sequence" else 1)


@pytest.mark.parametrize("layout", ["sequence", *slow("tensor", "ulysses")])
def test_the_least_costs_of_a_use_are_below_its_own(layout: str) -> None:
    """They are known from few and many rows, and from a group of fewer devices."""
    menu = menu_of(LARGE, "a100:1x4")

    def seconds(tp: int, rows: int, is_least: bool = False) -> float:
        use = Use(tp, layout, "none", "whole", rows)
        costs = menu.least(use) if is_least else menu.costs(use)
        return costs.rest.seconds + 4 * costs.runs[0].seconds if costs else 0.0

    assert seconds(2, 16, is_least=True) == 0
    few, many = seconds(2, 1), seconds(2, 4)
    ways = [(2, 16), (4, 1)]
    least = {way: seconds(*way, is_least=True) for way in ways}
    assert least[2, 16] == pytest.approx(0.85 * (few + 5 * (many - few)))
    for way, low in least.items():
        assert 0.4 * (own := seconds(*way)) < low < own, way


def test_the_least_costs_of_a_use_that_was_measured_before_are_its_own() -> None:
    """As in a second search, which reads the costs of few and of many rows from the disk."""
    menu, again, use = menu_of(GPT, "a100:1x2"), menu_of(GPT, "a100:1x2"), Use(2, "sequence", "none", "whole", 1)
    costs = menu.costs(use)
    again._measured |= menu._measured
    assert again.known(use) is None
    assert again.least(use) == costs is not None
