"""Emitted code is executed on symbols: what its program does not say is refused, whatever the way of writing."""

from __future__ import annotations

import random
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import superscaler as ss
from superscaler.compiler import Compiled, compile_graph
from superscaler.emit.tables import Table, Tables
from superscaler.errors import TranslationError
from superscaler.plans import resolve
from superscaler.translation.check import check_translation
from tests.helpers.graphs import graph_of
from tests.helpers.ran import Around, captured, equal, exact
from tests.helpers.sweeps import few, slow
from tests.translation.edits import drawn

GPT, DEEP = "gpt2:size=tiny", "gpt2:size=tiny,layers=4,batch=16"
MLP = "mlp:layers=4,hidden=8,inputs=4,classes=4,batch=64"
PLANS = [
    (GPT, "hybrid:dp=2,tp=2,pp=2,microbatches=4", 8),
    (MLP, "pipeline_1f1b:microbatches=32", 4),
    ("gpt2:size=tiny,layers=4,dropout=0.1", "data_parallel", 2),
]
OTHERS = [
    (GPT, "zb_h1:microbatches=8", 2),
    (GPT, "swap:what=both,microbatches=2", 2),
    (DEEP, "zero:stage=3,microbatches=2", 2),
    (DEEP, "tensor_parallel", 2),
    (DEEP, "recompute", 1),
]


@cache
def compiled(model: str, plan: str, devices: int) -> Compiled:
    return compile_graph(graph_of(model), resolve(plan), ss.Cluster.local(devices))


def lomo(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Update each block before the block below runs backward."""
    n = len(cluster.devices)
    ss.op_trans(graph, graph.forward_ops, ss.Split("batch", n, axis="dp"))
    for below, block in zip(graph.blocks, graph.blocks[1:], strict=False):
        read = {o.tensor for op in block.ops for o in op.inputs}
        own = [update for weight, update in graph.updates.items() if weight in read]
        ss.op_order(graph, own, graph.select(module=below.path, kind="B"))
    ss.op_assign(graph, graph.ops, cluster.mesh(dp=n))


def shards(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Shard each weight, frozen ones too, and recompute each block."""
    n = len(cluster.devices)
    for block in graph.blocks:
        ss.op_trans(graph, block.ops, ss.Recompute())
    ss.op_trans(graph, graph.forward_ops, ss.Split("batch", n, axis="dp"))
    ss.op_assign(graph, graph.forward_ops, cluster.mesh(dp=n))
    for tensor in graph.model.tensors.values():
        if tensor.kind == "parameter" and not tensor.origin:
            ss.place(graph, tensor, ss.Shard(n), cluster.devices, ahead=0)


class Adapter(nn.Module):
    """A linear layer whose base is frozen, with a product of two small matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) / 8)
        self.b = nn.Parameter(torch.randn(base.out_features, 2) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Squared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().sum()


def adapted() -> ss.Graph:
    """Return a llama with adapters of queries and values."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=5, **sizes)).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapter(layer.self_attn.v_proj)
    ids, trained = torch.randint(0, 32, (4, 8)), [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    return ss.capture(model, kwargs={"input_ids": ids, "labels": ids}, optimizer=optimizer, check=False)


def test_updates_between_the_backwards_of_equal_layers_train_the_weights_of_each() -> None:
    assert "for l in" in equal(graph_of(DEEP), lomo).compiled.emitted.files["program_0.py"]


def test_gathered_weights_do_not_take_the_name_of_what_they_wait_for() -> None:
    equal(adapted(), shards)


class Gate(nn.Module):
    """A layer that reads, before its last operator, a view of what all layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) * gate.t())


def gated(module: Any, x: torch.Tensor) -> torch.Tensor:
    gate = module.first(x).exp()
    for layer in module.layers:
        x = layer(x, gate)
    return x.square().mean()


def test_values_that_all_layers_read_end_in_the_last_one() -> None:
    layers = nn.ModuleList(Gate() for _ in range(4))
    graph = captured(lambda: (Around(gated, first=nn.Linear(4, 4), layers=layers), torch.randn(4, 4)))
    text = equal(graph, "single", 1).compiled.emitted.files["segments.py"]
    assert "        if l == 2:\n            del exp, t\n" in text


def test_weights_of_equal_layers_at_the_root_are_named_by_layer() -> None:
    layers = (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(3))
    model = nn.Sequential(*layers, Squared())
    equal(ss.capture(model, (torch.rand(8, 4),), optimizer=torch.optim.SGD(model.parameters(), 0.1)), "zero:stage=3")


def test_sums_of_layers_are_those_of_all_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    # As where the gradients of each layer are a bucket of their own.
    monkeypatch.setattr("superscaler.materialize.buckets.BUCKET_BYTES", 20_000)
    files = equal(graph_of(DEEP), "hybrid:dp=2,tp=2,pp=1,microbatches=8", 4).compiled.emitted.files
    assert "{l: rt.sums(" in files["program_0.py"]


def refusal(of: Compiled, **changed: Any) -> str:
    """Return why code is refused; "" if it is not."""
    try:
        check_translation(of.program, replace(of.emitted, **changed))
    except TranslationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("model", "plan", "devices"), [*few(PLANS, 0, 1), *slow(*OTHERS)])
def test_edits_of_code_are_refused(model: str, plan: str, devices: int) -> None:
    of = compiled(model, plan, devices)
    files = of.emitted.files
    edits = [(file, *edit) for file, text in files.items() for edit in drawn(text, 1, 16 // len(files))]
    assert len(edits) >= 12
    missed = [(file, kind, text) for file, kind, text in edits if not refusal(of, files={**files, file: text})]
    assert not missed, missed[0]


@pytest.mark.parametrize(("model", "plan", "devices"), few(PLANS, 0, 1))
def test_edits_of_data_are_refused(model: str, plan: str, devices: int) -> None:
    of = compiled(model, plan, devices)
    tables = list(of.emitted.tables)
    checked = of.program.devices.fold.sampled if of.fold else range(devices)  # type: ignore[attr-defined]
    edits = [(rank, edit) for rank in checked for edit in _edits(tables[rank])]
    missed = [
        (rank, *told)
        for rank, (told, edited) in random.Random(0).sample(edits, min(30, len(edits)))
        if not refusal(of, tables=[*tables[:rank], edited, *tables[rank + 1 :]])
    ]
    assert not missed


def test_entries_that_move_by_another_step_are_refused() -> None:
    of = compiled(*PLANS[-2])
    tables = list(of.emitted.tables)
    evenly = {
        field.name: own.spans for field in fields(Tables) if isinstance(own := getattr(tables[0], field.name), Table)
    }
    edits = [(name, n) for name, spans in evenly.items() for n in range(len(spans))]
    # Messages, inputs and more: in each of them repetition n is moved by n.
    assert len({name for name, _ in edits}) > 1
    for name, n in edits:
        table = getattr(tables[0], name)
        start, width, count = table.spans[n]
        moved = Table(deepcopy([*table]), table.spans)
        for turn in range(count):
            for _ in range(turn):
                moved[start + turn * width] = _other(moved[start + turn * width])
        assert refusal(of, tables=[replace(tables[0], **{name: moved}), *tables[1:]]), (name, n)


def _edits(tables: Tables) -> Iterator[tuple[tuple[str, Any], Tables]]:
    """Yield tables of a device with another number in one entry, each with the entry."""
    for field in fields(tables):
        for n, entry in enumerate(getattr(tables, field.name)):
            changed = asdict(tables)[field.name]
            changed[n] = _other(deepcopy(entry))
            yield (field.name, entry), replace(tables, **{field.name: changed})


def _other(entry: Any) -> Any:
    """Return data with another first number, flag or name."""
    if isinstance(entry, dict):
        name = next(iter(entry))
        return {**entry, name: _other(entry[name])}
    if isinstance(entry, list | tuple):
        whole = [n for n, x in enumerate(entry) if not isinstance(x, list | tuple) or x]
        return type(entry)(_other(x) if n == whole[-1] else x for n, x in enumerate(entry)) if whole else (0,)
    return not entry if isinstance(entry, bool) else entry + 1 if isinstance(entry, int) else f"{entry}_"


def test_a_refusal_names_the_line_and_what_the_program_has() -> None:
    of = compiled(GPT, "hybrid:dp=2,tp=2,pp=2,microbatches=4", 8)
    files = of.emitted.files
    text = (
        files["program_0.py"].replace("    rt.send(", "    pass\n    rt.send(", 1).replace("rt.input(1)", "rt.input(0)")
    )
    told = refusal(of, files={**files, "program_0.py": text})
    assert "program_0.py, line " in told
    assert "entry 0 of inputs on device" in told
    assert "input_ids_m1 = rt.input(0)" in told or "rt.input(0)" in told
    assert "a fault of superscaler" in told


def test_code_that_calls_nothing_or_something_else_is_refused() -> None:
    of = exact(graph_of(MLP), "single", 1)
    files = of.emitted.files
    for text in (
        "def step(rt):\n    pass\n",
        "import os\n",
        "step = 5\n",
        "def step(rt):\n    rt.reset()\n",
        "def step(",
    ):
        assert "does not do what the program says" in refusal(of, files={**files, "program_0.py": text})


def test_code_is_judged_alike_where_a_thread_looks_at_the_frames_of_others() -> None:
    """As the watchdog of a rank does: it holds the variables of the functions that it looks at for a moment."""
    plan = compiled(GPT, "pipeline_1f1b:microbatches=2", 2)
    is_over, main = threading.Event(), threading.get_ident()

    def look() -> None:
        while not is_over.is_set():
            frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[main])]
            time.sleep(0.002)
            assert frames.pop()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(20):
            check_translation(plan.program, plan.emitted)
    finally:
        is_over.set()
        thread.join()
