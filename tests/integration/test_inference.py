"""Steps that train nothing return what the module returns, under every plan; steps that train may return it too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import superscaler as ss
from superscaler.artifact import initial_values
from superscaler.errors import CaptureError, InputError
from superscaler.ir.program import Backward, Instruction, Load, ended, reads, writes
from superscaler.runtime.executor import Rank
from superscaler.runtime.step import Step
from superscaler.store.checkpoint import CheckpointHead
from superscaler.store.folder import read
from tests.helpers.live import Live
from tests.helpers.ran import SProgram, equal, on_ranks
from tests.helpers.rewrites import on_top
from tests.helpers.sweeps import few, slow

PLANS = [
    ("single", 1),
    ("data_parallel", 2),
    ("tensor_parallel", 2),
    ("pipeline_1f1b:stages=2,microbatches=2", 2),
    ("hybrid:dp=1,tp=2,pp=2,microbatches=2", 4),
]


@dataclass
class Found:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    count: int = 3
    nothing: None = None


class Net(nn.Module):
    """Returns an object with all that can be returned; in training also a loss."""

    def __init__(self, kind: str = "object", depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.norm, self.head, self.kind = nn.BatchNorm1d(8), nn.Linear(8, 4), kind

    def forward(self, x: Tensor) -> Any:
        h = x
        for layer in self.layers:
            h = torch.relu(layer(h))
        logits = self.head(self.norm(h))
        if self.kind == "tensor":
            return logits
        if self.kind == "tuple":
            return logits, [logits.argmax(-1), x], self.head.weight
        if self.kind == "loss":
            return {"loss": logits.pow(2).mean(), "logits": logits, "shown": h.detach()}
        return Found(logits, (h, logits.softmax(-1).sum(0)))


def net(kind: str = "object", depth: int = 3) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(kind, depth), torch.randn(8, 8)


@cache
def fixed(kind: str = "object") -> tuple[ss.Graph, Net, Tensor]:
    module, x = net(kind)
    return ss.capture(module.eval(), (x,), optimizer=None, check=False), module, x


def last(plan: SProgram | str, graph: ss.Graph, devices: int = 1, steps: int = 1) -> list[Any]:
    """Return what the last of some steps returns on each rank."""
    batch = graph.captured.batch
    compiled = ss.compile(graph, plan, f"local:{devices}")
    return on_ranks(compiled, lambda step: [step(batch) for _ in range(steps)][-1])


def check(graph: ss.Graph, plan: SProgram | str, devices: int) -> None:
    ran = equal(graph, plan, devices)
    assert (ran.found["trains"], ran.found["reference"]) == (False, "eager")
    assert ran.found["output_error"] < 1e-9
    assert not any(function.saved or function.grads for function in ran.program.functions)
    for device in ran.program.devices:
        assert not any(isinstance(i, Backward) for i in device.instructions)
        check_freed(device.instructions)


def check_freed(code: Sequence[Instruction]) -> None:
    """Check that all but what is loaded or given last is freed right after its last use."""
    last = {name: at for at, i in enumerate(code) for name in (*reads(i), *writes(i))}
    freed = {name: at for at, i in enumerate(code) for name in ended(i)}
    loaded = {i.out for i in code if isinstance(i, Load)}
    assert freed.keys() >= last.keys() - loaded - {n for n, at in last.items() if at == len(code) - 1}
    assert all(at == last[name] + (not name.is_handle) for name, at in freed.items())


@pytest.mark.parametrize(
    ("kind", "plan", "devices"),
    [
        *(("object", *plan) for plan in PLANS[1:]),
        *slow(("object", *PLANS[0]), ("tensor", *PLANS[1]), ("tuple", *PLANS[3]), ("tuple", *PLANS[4])),
    ],
)
def test_every_output_is_that_of_the_module(kind: str, plan: str, devices: int) -> None:
    check(fixed(kind)[0], plan, devices)


def test_an_inference_plan_is_equal_as_it_runs() -> None:
    result = ss.compile(fixed()[0], "data_parallel", "local:2").verify()
    assert (result["equal"], result["trains"]) == (True, False), result


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    config = GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=64, n_positions=16, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config), {"input_ids": torch.randint(0, 64, (4, 8))}


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    config = T5Config(num_layers=2, num_heads=4, d_model=32, d_kv=8, d_ff=64, vocab_size=64, use_cache=False)
    ids = torch.randint(0, 64, (4, 8))
    return T5ForConditionalGeneration(config), {"input_ids": ids, "decoder_input_ids": ids, "labels": ids}


@pytest.mark.parametrize("model", [gpt2, *slow(t5)])
def test_models_of_the_library(model: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> None:
    module, kwargs = model()
    graph = ss.capture(module.eval(), (), kwargs, optimizer=None, check=False)
    for plan, devices in PLANS[3:]:
        check(graph, plan, devices)


@pytest.mark.parametrize(("plan", "devices"), PLANS[2:])
def test_a_step_returns_the_same_whole_outputs_on_every_rank(plan: str, devices: int) -> None:
    graph, module, x = fixed()
    wanted = module(x)
    for found in last(plan, graph, devices, steps=2):
        assert list(found) == ["logits", "hidden", "count", "nothing"]
        assert (found.count, found.nothing, type(found.hidden)) == (3, None, tuple)
        assert not found.logits.requires_grad
        for have, want in ((found.logits, wanted.logits), *zip(found.hidden, wanted.hidden, strict=True)):
            torch.testing.assert_close(have, want.detach())
        with pytest.raises(AttributeError, match="returns no loss, but logits, hidden, count, nothing"):
            _ = found.loss


def test_tuples_and_tensors_come_back_as_they_are() -> None:
    graph, module, x = fixed("tuple")
    (found,) = last("single", graph)
    assert (type(found), type(found[1])) == (tuple, list)
    assert torch.equal(found[1][0], module(x)[0].argmax(-1))
    assert torch.equal(found[1][1], x)
    assert torch.equal(found[2], module.head.weight)
    graph, module, x = fixed("tensor")
    # Idle ranks have it too.
    for found in last(lambda graph, _: ss.op_assign(graph, graph.forward_ops, 0), graph, 3):
        torch.testing.assert_close(found, module(x).detach())
    graph, module, x = fixed("loss")
    (found,) = last("single", graph)
    torch.testing.assert_close(found.loss, module(x)["loss"].detach())


def test_a_plan_may_place_an_output_itself() -> None:
    graph, module, x = fixed()

    def apart(graph: ss.Graph, cluster: ss.Cluster) -> None:
        for op in graph.forward_ops:
            ss.op_assign(graph, ss.op_trans(graph, op, ss.Split("batch", 2)), cluster.devices)
        ss.op_assign(graph, ss.op_trans(graph, graph.op("return.logits"), ss.Split("batch", 2)), cluster.devices)
        ss.op_assign(graph, graph.op("return.hidden.1"), cluster.devices[0])

    check(graph, apart, 2)
    wanted = module(x)
    first, second = last(apart, graph, 2)
    for half, found in zip(wanted.logits.split(4), (first, second), strict=True):
        torch.testing.assert_close(found.logits, half.detach())
        torch.testing.assert_close(found.hidden[0], wanted.hidden[0].detach())
    torch.testing.assert_close(first.hidden[1], wanted.hidden[1].detach())
    assert second.hidden[1] is None


def test_two_parts_of_an_output_on_one_device_are_refused() -> None:
    def doubled(graph: ss.Graph) -> None:
        ss.op_assign(graph, ss.op_trans(graph, graph.op("return"), ss.Split("batch", 2)), [0, 0])

    def hosted(graph: ss.Graph) -> None:
        ss.op_assign(graph, graph.op("return"), "host")

    with pytest.raises(InputError, match=r"op_assign at .*py:\d+: output return has 2 parts on 1 devices, but a"):
        ss.compile(fixed("tensor")[0], on_top("single", doubled), "local:1")
    with pytest.raises(InputError, match="only copies"):
        ss.compile(fixed("tensor")[0], on_top("single", hosted), "local:1")


def test_inference_is_asked_for_or_all_there_is() -> None:
    module, x = net()
    with pytest.raises(InputError, match="or optimizer=None for inference: no gradients, no updates"):
        ss.capture(module, (x,))
    with torch.no_grad():
        assert not ss.capture(module, (x,)).model.loss
    assert not ss.capture(module.requires_grad_(False), (x,)).model.loss
    with pytest.raises(InputError, match="or no scaler"):
        ss.capture(module, (x,), optimizer=None, scaler=torch.amp.GradScaler("cpu"))
    trained = net()[0]
    with pytest.raises(CaptureError, match="or capture it with optimizer=None, for inference"):
        ss.capture(trained, (x,), optimizer=torch.optim.SGD(trained.parameters()))


def test_the_mode_of_the_module_counts() -> None:
    """In training mode a batch norm takes the statistics of the batch, and moves its buffers, in inference too."""
    module, x = net("tensor")
    graph = ss.capture(module.train(), (x,), optimizer=None)
    assert [op.name for op in graph.ops if op.is_write and not op.is_output] != []
    check(graph, "data_parallel", 2)
    assert [op.name for op in fixed("tensor")[0].ops if not op.is_forward] == ["return"]


@pytest.mark.parametrize(("plan", "devices"), few([*PLANS[1:], ("zero:stage=3", 2)], 0))
def test_a_step_that_trains_keeps_outputs_beside_its_loss(plan: str, devices: int) -> None:
    module, x = net("loss")
    module.norm.eval()
    graph = ss.capture(module, (x,), optimizer=torch.optim.SGD(module.parameters(), lr=0.1), outputs=True, check=False)
    result = equal(graph, plan, devices).found
    assert (result["trains"], result["outputs"]) == (True, ["return.logits", "return.shown"])

    def run(step: Step) -> tuple[Tensor, Any]:
        return step(graph.captured.batch), step.outputs

    for loss, found in on_ranks(ss.compile(graph, plan, f"local:{devices}"), run):
        torch.testing.assert_close(loss, module(x)["loss"].detach())
        torch.testing.assert_close(found.logits, module(x)["logits"].detach())
        assert found.loss is None


class Scored(nn.Module):
    """Returns its scores, and then its loss, as models of strangers do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(x)
        return scores, F.cross_entropy(scores, y)


def test_the_only_scalar_of_a_tuple_is_its_loss() -> None:
    module, batch = Scored(), {"x": torch.randn(4, 8), "y": torch.randint(4, (4,))}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    equal(ss.capture(module, (), batch, optimizer, outputs=True, check=False), "data_parallel", 2)
    frozen = ss.compile(ss.capture(module.eval(), (), batch, optimizer=None, check=False), "data_parallel", "local:2")
    for found in on_ranks(frozen, lambda step: step.evaluate([batch])):
        assert found["loss"] == pytest.approx(float(module(**batch)[1].detach()))


def test_what_a_step_without_gradients_cannot_do_is_refused() -> None:
    graph, *_ = fixed("tensor")
    batch = graph.captured.batch

    def run(step: Step) -> Any:
        for options in ({"clip": 1.0}, {"check_finite": True}):
            with pytest.raises(InputError, match="trains nothing, so there is no gradient"):
                step(batch, **options)
        with torch.no_grad():
            assert step.lr == ()
            return step(batch)

    assert on_ranks(ss.compile(graph, "single", "local:1"), run)[0].shape == (8, 4)


def test_what_is_no_tensor_is_refused() -> None:
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0)
    with pytest.raises(CaptureError, match=r"returns \w+ of class DynamicCache.*use_cache=False"):
        ss.capture(GPT2LMHeadModel(config).eval(), (torch.zeros(1, 4, dtype=torch.long),), optimizer=None)

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> dict[str, int]:
            return {"count": 3}

    with pytest.raises(CaptureError, match="returns no tensor"):
        ss.capture(Nothing(), (torch.zeros(2),))


def test_a_wrong_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, give = fixed()[0], Rank.give

    def wrong(self: Rank, name: str, x: Tensor, shape: Any) -> Any:
        return give(self, name, x + (name == "return.hidden.0"), shape)

    monkeypatch.setattr(Rank, "give", wrong)
    result = ss.compile(graph, "data_parallel", "local:2").verify()
    assert not result["equal"]
    assert result["first_difference"].startswith("the output return.hidden.0[0:8, 0:8] on device 0 is off by")


def peak(depth: int, optimizer: Callable[[nn.Module], Any]) -> int:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = F.gelu(layer(x))
            return x.mean()

    module = Deep()
    graph = ss.capture(module, (torch.randn(64, 16),), optimizer=optimizer(module), check=False)

    def run(step: Step) -> int:
        step(graph.captured.batch)
        with Live(step.state.weights.values()) as live:
            step(graph.captured.batch)
        return live.peak

    return on_ranks(ss.compile(graph, "single", "local:1"), run)[0]


def test_memory_does_not_grow_with_the_depth() -> None:
    assert peak(2, lambda _: None) == peak(9, lambda _: None) > 0
    assert peak(9, lambda m: torch.optim.SGD(m.parameters())) > 3 * peak(9, lambda _: None)


def test_a_checkpoint_of_inference_has_the_weights(tmp_path: Path) -> None:
    """It gives a step its weights back; one that trains starts its optimizer anew from them."""

    def saved(step: Step) -> Path:
        return step.save(tmp_path)

    def restored(step: Step) -> dict[str, Tensor]:
        for x in step.state.weights.values():
            x.detach().zero_()
        assert step.restore(tmp_path) == 0
        tables, names = step.state.tables["weights"], step.plan["tensors"]
        return {names[entry["tensor"]]["name"]: step.state.weights[entry["name"]].detach() for entry in tables}

    plan = ss.compile(fixed("loss")[0], "single", "local:1")
    values = initial_values(plan.compiled.graph.model, plan.compiled.graph.captured.values)
    assert read(on_ranks(plan, saved)[0], CheckpointHead).head
    module, x = net("loss")
    trained = ss.capture(module.eval(), (x,), optimizer=torch.optim.AdamW(module.parameters()), check=False)
    for other in (plan, ss.compile(trained, "single", "local:1")):
        (found,) = on_ranks(other, restored)
        assert found
        assert all(torch.equal(x, values[name]) for name, x in found.items())
