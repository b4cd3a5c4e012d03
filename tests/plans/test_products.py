"""Plans along one axis of a mesh: alone, multiplied, from files, and every way in which a product is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import superscaler as ss
from superscaler.compiler import compile_graph
from superscaler.errors import InputError
from superscaler.ir.program import Collective, Send
from superscaler.plans import names, over_servers, resolve
from tests.helpers.graphs import graph_of
from tests.helpers.ran import Around, captured, equal
from tests.verbs.chains import chain

HIDDEN = """
import superscaler as ss

@ss.along_axis()
def hidden(graph, n, axis, required=False):
    ss.op_trans(graph, graph.forward_ops, ss.Split("hidden", n, required=required, axis=axis))
"""


def devices(graph: ss.Graph, op: str) -> list[int]:
    return graph.rows(graph.op(op)).device.tolist()


def test_gradients_are_summed_by_server_first() -> None:
    """Of three servers with four devices each, of which some tell of all."""
    servers, devices = 2, 2
    links = "links: {network: {bandwidth: 1e8}}"
    cluster = f"{{name: slow, preset: local, servers: {servers}, devices_per_server: {devices}, {links}}}"
    code = equal(graph_of("mlp:layers=4,hidden=24,batch=12"), "data_parallel", cluster).code()
    kinds = [i.kind for i in code if isinstance(i, Collective)]
    # The ten numbers of a bias are no four slices.
    assert [kind for kind in kinds if kind != "all_reduce"] == ["reduce_scatter", "all_gather"]


def test_a_product_places_along_its_axes_the_outer_first() -> None:
    graph = chain()
    resolve("pipeline_1f1b:2,microbatches=2 x data_parallel:4")(graph, ss.Cluster.local(8))
    assert devices(graph, "mul0") == [0, 1, 2, 3] * 2
    assert devices(graph, "mul2") == [4, 5, 6, 7] * 2
    # What no plan cuts follows what reads it.
    assert devices(graph, "update.w") == [-1]


@pytest.mark.parametrize(("spec", "strides"), [("{} x zero:3", (3, 1)), ("zero:3 x {}", (1, 2))])
def test_a_plan_that_is_last_follows_the_others_wherever_it_stands(
    spec: str, strides: tuple[int, int], tmp_path: Path
) -> None:
    graph, file = chain(size=12), tmp_path / "mine.py"
    file.write_text(HIDDEN)
    resolve(spec.format(f"{file}:hidden:2"))(graph, ss.Cluster.local(6))
    rows = graph.rows(graph.op("update.w"))
    # Element 3 h + z of w rests where part h of hidden meets place z of zero.
    assert rows.lo.reshape(-1).tolist() == list(range(6))
    assert rows.device.tolist() == [h * strides[0] + z * strides[1] for h in range(2) for z in range(3)]


@pytest.mark.parametrize("spec", ["{}:hidden:2 x data_parallel:2", "data_parallel:2 x {}:2,required=true", "{}:3"])
def test_a_plan_of_a_file_is_a_factor_too(spec: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HIDDEN)
    world = 3 if spec == "{}:3" else 4
    compiled = compile_graph(chain(), resolve(spec.format(file)), ss.Cluster.local(world))
    assert len(compiled.graph.rows(compiled.graph.op("mul0"))) == world


@pytest.mark.parametrize(
    ("spec", "devices"),
    [
        ("data_parallel x recompute:what=full", [0, 1, 2, 3]),
        ("recompute:what=full x data_parallel:2", [0, 2, 1, 3]),
        ("recompute:what=full x swap:what=optimizer", [0, 1, 2, 3]),
    ],
)
def test_what_recomputes_leaves_the_devices_to_others(spec: str, devices: list[int]) -> None:
    """A quarter of the batch is on each device; the last plan of a product has neighbours."""
    graph = chain()
    resolve(spec)(graph, ss.Cluster.local(4))
    rows = graph.rows(graph.op("mul0"))
    assert rows.lo.reshape(4, -1).tolist() == [[0, 0], [2, 0], [4, 0], [6, 0]]
    assert rows.device.tolist() == devices


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("data_parallel:2", "mesh data_parallel=2 needs 2 devices, but there are 4; make the two numbers equal"),
        ("data_parallel:3 x zero", "mesh data_parallel=3,zero=-1: 3 does not divide the 4 devices; choose 1, 2 or 4"),
        ("data_parallel x zero x recompute", "data_parallel and zero have no number of devices"),
        ("data_parallel x zero", "data_parallel and zero have no number of devices; write it for all but one, as data"),
        ("zero:2 x zero:2", "'zero:2 x zero:2' has zero twice; choose one, of the product of the two numbers"),
        ("single x zero", "single places all ops itself, so it cannot be multiplied; only plans along"),
        ("hybrid:2", "'hybrid:2': hybrid places all ops itself"),
        ("zero:2,tensor_parallel:2", "'zero:2,tensor_parallel:2': tensor_parallel:2 is a plan, not a key; write ' x '"),
        ("zero:2,stage x zero:2", "'zero:2,stage': the key 'stage' has no value"),
        ("data:2 x zero", "unknown plan 'data'; did you mean 'dap'? Known: "),
        ("zero:2,stag=1 x data_parallel:2", "unknown key 'stag'; did you mean 'stage'"),
        ("hybrid:dp=2,tp=2,pp=2", "mesh pp=2,dp=2,tp=2 needs 8 devices, but there are 4"),
        ("hybrid:dp=0,tp=2,pp=2", "every size must be at least 1"),
        ("hybrid:dq=2", "dq"),
        ("hybird", "did you mean 'hybrid'"),
    ],
)
def test_a_wrong_product_is_refused(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        resolve(spec)(chain(), ss.Cluster.local(4))


def test_the_plans_along_one_axis_are_told_by_their_mark() -> None:
    found = {name for name in names() if hasattr(getattr(resolve(name), "func", None), "cut")}
    assert {"data_parallel", "tensor_parallel", "pipeline_1f1b", "zero"} <= found
    assert not {"single", "hybrid"} & found


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            "tensor_parallel:4 x data_parallel",
            "devices 0 and 12 (24 GB/s a NIC, not 240); the first factor is outermost",
        ),
        ("tensor_parallel", "of 16 communicates in each layer over servers, as devices 0 and 15"),
        ("hybrid:tp=16", "tp of 8 stays inside, beside 2 times as many"),
        ("data_parallel x tensor_parallel:4 x recompute", ""),
        ("tensor_parallel:4 x data_parallel x recompute", "data_parallel x recompute x tensor_parallel:4 stays inside"),
        ("hybrid:dp=2,tp=8", ""),
        ("fsdp", ""),
    ],
)
def test_layers_that_wait_for_other_servers_are_said(spec: str, said: str) -> None:
    line = over_servers(spec, ss.Cluster.parse("a100:2x8"))
    assert said in line if said else not line


def test_a_loss_added_up_over_stages_stays_in_its_microbatch_and_in_its_pipeline() -> None:
    """Each stage adds its own losses to the sum that it is sent: of the same microbatch, from the same pipeline."""

    def forward(m: Around, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for layer in m.layers:
            x = x + layer(x).tanh()
            total = total + x.abs().mean()
        return x.square().mean() + total

    graph = captured(
        lambda: (Around(forward, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(4))), torch.randn(8, 4))
    )
    program = equal(graph, "data_parallel:2 x pipeline_1f1b:2,microbatches=4", 4).program
    for device in program.devices:
        assert len({i.peer for i in device.instructions if isinstance(i, Send)}) == 1
