"""Recorded steps: two of them are the same but for data, and replays train as steps do (`tests/helpers/replays.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.artifact import describe, initial_values
from superscaler.comm.threads import ThreadCommunicator, run_ranks
from superscaler.compiler import Compiled
from superscaler.errors import InputError, RuntimeFailure
from superscaler.plans import names
from superscaler.runtime.load import modules
from superscaler.runtime.replay import cuda
from superscaler.runtime.replay.replays import WARM
from superscaler.runtime.replay.static import Static
from superscaler.runtime.replayable import refusals
from superscaler.runtime.replayable.reads import Reads
from superscaler.runtime.step import Step, build_step
from tests.helpers.graphs import graph_of
from tests.helpers.ran import as_in, captured, exact
from tests.helpers.replays import Emulator, Recording, differences, on_recorders
from tests.helpers.sweeps import few, slow

DEEP = "gpt2:size=tiny,layers=4,batch=16"
# Of plans of the library: models and options that they need, and devices of those that use one.
MODELS = {"dap": "alphafold2:size=tiny,layers=1,passes=1", "expert_parallel": "mixtral:size=tiny,seq=16",
          "three_f_one_b": "alphafold2:size=tiny"}  # fmt: skip
OPTIONS = {"chain_recompute": ":every=sqrt", "hybrid": ":dp=2,tp=1", "swap": ":what=activations"}
ALONE = ("single", "recompute", "chain_recompute", "co_shard", "chunked_loss", "gradient_accumulation", "swap")
# Why plans are not replayed; flexible is what its table says.
REFUSED = {"swap": "waits for copies", "expert_parallel": "aten.nonzero"}


class Net(nn.Module):
    """Layers with a norm and dropout, and noise: plans in float64 drop nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.3)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return (x + torch.rand_like(x)).square().mean()


def small(kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, lr: float = 0.1, **options: Any) -> ss.Graph:
    return captured(lambda: (Net(), torch.rand(8, 4)), lr, lambda p, lr: kind(p, lr=lr, **options))


def other(batch: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """Return a batch with other numbers of the same sort."""
    draw, found = torch.Generator().manual_seed(number), {}
    for name, x in batch.items():
        moved = x.flatten()[torch.randperm(x.numel(), generator=draw)].reshape(x.shape)
        found[name] = torch.rand(x.shape, generator=draw, dtype=x.dtype) if x.is_floating_point() else moved
    return found


def trained(
    compiled: Compiled, is_recorded: bool, change: Callable[[Step, int], None] | None = None, **more: Any
) -> list[Any]:
    """Return, for each rank, losses and norms of steps at falling rates, weights, recorder and step. The first recorded
    step is recorded again.
    """
    batch = as_in(compiled, compiled.graph.captured.batch)

    def work(step: Step, recorder: Emulator | None) -> Any:
        found = []
        for number in range(WARM + 4):
            step.groups.set({"lr": rate * 0.9} for rate in step.groups.rates())
            if change is not None:
                change(step, number)
            if step.replays is not None and number == WARM + 1:
                step.replays._recorded = None
            several = [other(batch, 10 * number + k) for k in range(step.iterations)]
            loss = step(several if step.iterations > 1 else several[0], **more)
            found.append((loss.detach(), step.last_norm or 0.0))
        return found, {name: w.detach().clone() for name, w in step.state.weights.items()}, recorder, step

    return on_recorders(compiled, work, is_recorded)


def assert_replayed(compiled: Compiled, recordings: int = 2, rtol: float = 1e-12, **more: Any) -> list[Any]:
    """Compare two recordings of a plan with other data, rates and random numbers; and what replays train with what
    steps do. Return what is found of the replays.
    """
    found, expected = (trained(compiled, is_recorded, **more) for is_recorded in (True, False))
    for (*own, recorder, step), (*theirs, _, plain) in zip(found, expected, strict=True):
        first, second = recorder.recordings[:2]
        assert first.reads == []
        assert differences(first, second) == []
        assert len(recorder.recordings) == recordings
        assert recorder.replays > 0
        torch.testing.assert_close(own, theirs, rtol=rtol, atol=rtol)
        counts = [(one.state.steps, one.state.works, one.bytes_moved) for one in (step, plain)]
        assert counts[0] == counts[1]
    return found


@pytest.mark.parametrize(
    ("plan", "devices"),
    [("gradient_accumulation:microbatches=2", 1), ("recompute", 1), ("zero:stage=3", 2),
     ("zb_h1:2,microbatches=4", 2), *slow(("single", 1), ("pipeline_1f1b:2,microbatches=4", 2))],
)  # fmt: skip
def test_replays_of_a_small_plan_train_as_its_steps(plan: str, devices: int) -> None:
    compiled = exact(small(momentum=0.9), plan, devices)
    assert all(device["draws"] for device in describe(compiled)["devices"])
    assert_replayed(compiled, clip=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "devices"), [("single", 1), ("ring_attention", 2)])
def test_attention_inside_documents_is_replayed_under_its_mask(plan: str, devices: int) -> None:
    """Each replay has documents of its own, in the shapes of the recorded one."""
    assert_replayed(exact(graph_of("llama:size=tiny,layers=1,documents=12+8+12", "SGD"), plan, devices))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*names(), "expert_parallel:capacity=2.0"])
def test_every_plan_of_the_library_is_replayed_or_says_why_not(name: str) -> None:
    if name == "flexible":
        pytest.skip("it is what a table of the user says")
    model = MODELS.get(name.partition(":")[0], DEEP)
    compiled = exact(graph_of(model), name + OPTIONS.get(name, ""), 1 if name in ALONE else 2)
    if name in REFUSED:
        with pytest.raises(InputError, match=REFUSED[name]):
            trained(compiled, True)
    else:
        assert_replayed(compiled)


@pytest.fixture
def capturable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch's optimizers take tensors for numbers on a CPU, as they do on a GPU."""
    for module in ("adam", "nadam", "rmsprop"):
        found = import_module(f"torch.optim.{module}")
        monkeypatch.setattr(found, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
    refusals._reads.cache_clear()
    yield
    refusals._reads.cache_clear()


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], float]] = {
    "SGD": (torch.optim.SGD, {}, 1e-12),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, 1e-12),
    # Steps are counted in float32.
    "AdamW": (torch.optim.AdamW, {}, 1e-6),
    "fused Adam": (torch.optim.Adam, {"fused": True, "amsgrad": True}, 1e-6),
    "lists": (torch.optim.AdamW, {"foreach": True}, 1e-5),
    "one by one": (torch.optim.AdamW, {"foreach": False}, 1e-5),
    "NAdam": (torch.optim.NAdam, {}, 1e-4),
}


# SGD trains the small plans above; AdamW takes lists, or single tensors, by itself.
@pytest.mark.parametrize("name", few(OPTIMIZERS, 1, 2, 3))
def test_optimizers_are_replayed(name: str, capturable: None) -> None:
    kind, options, rtol = OPTIMIZERS[name]
    assert_replayed(exact(small(kind, 0.01, **options), "data_parallel", 2), rtol=rtol)


def test_two_optimizers_are_replayed() -> None:
    def pair(parameters: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(parameters[:6], lr=lr, momentum=0.9), torch.optim.AdamW(parameters[6:], lr=lr)]

    graph = captured(lambda: (Net(), torch.rand(8, 4)), 0.01, pair)
    assert_replayed(exact(graph, "data_parallel", 2), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "why"),
    [(("SGD", {"foreach": True}), "leave foreach of it open"),
     (("Adagrad", {"fused": False}), "leave fused of it open"),
     (("RMSprop", {}), "take AdamW, Adam or SGD")],
)  # fmt: skip
def test_optimizers_that_read_numbers_are_refused(
    options: tuple[str, dict[str, Any]], why: str, capturable: None
) -> None:
    graph = small(getattr(torch.optim, options[0]), **options[1])
    with pytest.raises(InputError, match=rf"the optimizer {options[0]} reads numbers in each update .*{why}"):
        trained(exact(graph, "single", 1), True)


def test_averages_are_replayed_and_a_new_decay_is_recorded() -> None:
    def change(step: Step, number: int) -> None:
        step.ema = 0.9 if number < WARM + 3 else 0.5

    for *_, recorder, step in assert_replayed(exact(small(), "single", 1), change=change):
        assert len(recorder.recordings) == 2
        assert not step.replays.is_recorded


def test_several_iterations_are_replayed() -> None:
    def twice(graph: ss.Graph, cluster: ss.Cluster) -> None:
        graph.unroll(2)
        ss.op_assign(graph, graph.ops, cluster.devices[0])

    for *_, step in assert_replayed(exact(small(), twice, 1)):
        assert step.state.steps == 2 * (WARM + 4)


def test_a_checkpoint_goes_into_the_next_replays(tmp_path: Path) -> None:
    def change(step: Step, number: int) -> None:
        if number == 1:
            step.save(tmp_path / str(step.replays is None))
        if number == WARM + 3:
            step.restore(tmp_path / str(step.replays is None))

    # The states of the optimizer are other tensors then: two steps run as they are.
    for *_, recorder, step in assert_replayed(exact(small(torch.optim.AdamW), "single", 1), rtol=1e-6, change=change):
        assert len(recorder.recordings) == 2
        assert not step.replays.is_recorded


def test_a_replay_does_not_go_on_with_states_that_were_replaced() -> None:
    def change(step: Step, number: int) -> None:
        if number == WARM + 3:
            for state in step.state.updates.optimizer.state.values():
                state["momentum_buffer"] = 2.0 * state["momentum_buffer"]

    for *_, step in assert_replayed(exact(small(momentum=0.9), "single", 1), change=change):
        assert not step.replays.is_recorded


def test_a_step_without_update_is_not_recorded() -> None:
    """Hooks of a loop hold updates back, and the next steps are replays again."""

    def change(step: Step, number: int) -> None:
        if number == WARM + 2:
            updates = step.state.updates
            updates.held = []
            step(other(as_in(compiled, compiled.graph.captured.batch), 5))
            updates.held = None

    compiled = exact(small(), "single", 1)
    assert_replayed(compiled, change=change)


def test_what_is_not_data_of_a_step_is_found() -> None:
    """Recordings differ by a number of Python, by other memory and by a message; a read is noted."""
    weight, total = torch.ones(3), torch.zeros(3)

    def recorded(rate: float, kept: Tensor, message: str, is_read: bool = False) -> Recording:
        recording = Recording()
        with recording:
            total.add_(kept, alpha=rate)
            if is_read:
                float(total.sum())
        recording.note(message, [], [], lambda: None)
        return recording

    first = recorded(0.1, weight, "send 1")
    assert differences(first, recorded(0.1, weight, "send 1")) == []
    assert "0.2" in differences(first, recorded(0.2, weight, "send 1"))[0]
    assert "not the same in both" in differences(first, recorded(0.1, torch.ones(3), "send 1"))[0]
    assert "send 2" in differences(first, recorded(0.1, weight, "send 2"))[0]
    assert recorded(0.1, weight, "send 1", is_read=True).reads == ["aten._local_scalar_dense.default"]


def moved_in(compiled: Compiled) -> list[list[str]]:
    """Return what each rank moves from its host or back in a step, with clipping, on a device that has no data."""
    plan, code = describe(compiled), modules(compiled.emitted.files)
    values = initial_values(compiled.graph.model, compiled.graph.captured.values)
    # Kernels of such a device are not fused.
    groups = [{**group, "fused": False} for group in plan["optimizer"]["groups"]]
    plan = {**plan, "optimizer": {**plan["optimizer"], "groups": groups}}

    def run(communicator: ThreadCommunicator) -> list[str]:
        step = build_step(plan, code, values, communicator)
        rank, updates = step.state, step.state.updates
        rank.batch, updates.held, updates.optimizer = compiled.graph.captured.batch, [], None
        static = Static(rank)
        static.fill()
        with Reads() as reads:
            with static.read():
                step.form.function(rank)
            held, updates.held, updates.clip, updates.is_recorded = updates.held, None, 0.5, True
            for change, pairs in held:
                change(pairs)
        return reads.found

    return run_ranks(compiled.program.world, run, device="meta")


@pytest.mark.parametrize("plan", ["zero:stage=3", "zb_h1:2,microbatches=4"])
def test_no_step_moves_data_between_host_and_device(plan: str) -> None:
    compiled = ss.compile(small(), plan, "local:2").compiled
    assert moved_in(compiled) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*names()} - {*REFUSED, "flexible"}))
def test_no_plan_of_the_library_moves_data_between_host_and_device(name: str) -> None:
    model, devices = MODELS.get(name, DEEP), 1 if name in ALONE else 2
    compiled = ss.compile(graph_of(model), name + OPTIONS.get(name, ""), f"local:{devices}").compiled
    assert moved_in(compiled) == [[]] * devices


def test_reads_are_noted_and_refused() -> None:
    x = torch.tensor([1.0, 0.0])
    with Reads() as reads:
        x[torch.tensor([0, 1])].nonzero()
        x[x > 0].sum().item()
    assert reads.found == ["aten.nonzero", "aten.index", "aten._local_scalar_dense"]
    with Reads() as reads:
        on_device = torch.ones(2).to("meta")
        # A scalar is a number to a kernel.
        on_device.mul(torch.tensor(2.0)).copy_(torch.ones(2))
    assert reads.found == ["aten._to_copy", "aten.copy_"]
    with pytest.raises(InputError, match=r"calls aten.nonzero .*Nothing was trained"), Reads(refuses=True):
        x.nonzero()


def test_what_cannot_be_replayed_is_refused_before_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    single = exact(small(torch.optim.AdamW), "single", 1)

    def checks(step: Step, recorder: Emulator | None) -> None:
        step(as_in(single, single.graph.captured.batch), check_finite=True)

    with pytest.raises(InputError, match="check_finite reads the loss"):
        on_recorders(single, checks)
    with pytest.raises(InputError, match=r"weight layers.* is updated on the host"):
        on_recorders(exact(small(torch.optim.AdamW), "swap:what=optimizer", 1), checks)
    with pytest.raises(InputError, match=r"on cpu \(gloo\); leave cuda_graph \(--cuda-graph\) out"):
        cuda.check_device(torch.device("cpu"))


def test_a_cuda_graph_is_captured_on_a_stream_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch is asked for, since no GPU is here."""
    fake, calls = MagicMock(), list[str]()
    for name in ("Stream", "CUDAGraph", "graph", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    recorder = cuda.CudaGraphs(torch.device("cuda", 0))
    own, present = fake.Stream.return_value, fake.current_stream.return_value
    own.wait_stream.side_effect = lambda _: calls.append("own waits")
    present.wait_stream.side_effect = lambda _: calls.append("present waits")
    recorder.warm(lambda: calls.append("runs"))
    assert calls == ["own waits", "runs", "present waits"]
    found, replay = recorder.record(lambda: "loss")
    assert (found, replay) == ("loss", fake.CUDAGraph.return_value.replay)
    fake.graph.assert_called_once_with(fake.CUDAGraph.return_value, stream=own, capture_error_mode="thread_local")
    fake.graph.return_value.__exit__.return_value = None

    def fails() -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    with pytest.raises(
        RuntimeFailure, match=r"cannot be captured as a CUDA graph: operation not permitted .*capturing;"
    ):
        recorder.record(fails)


def test_nccl_registers_no_memory_that_is_mapped_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    cuda.prepare_nccl()
    assert "NCCL_GRAPH_REGISTER" not in cuda.os.environ
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    cuda.prepare_nccl()
    assert cuda.os.environ["NCCL_GRAPH_REGISTER"] == "0"
