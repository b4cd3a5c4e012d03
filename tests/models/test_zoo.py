"""Every named model is captured with a rule for each operator, is cut by both plans, and its step equals one device."""

from __future__ import annotations

import pytest

import superscaler as ss
from superscaler.errors import ScheduleError
from superscaler.models import build, names
from superscaler.plans.lib.shared import tensor_splits
from tests.frontend.test_cuts import check_cuts
from tests.helpers.graphs import assert_equal, graph_of, step_of
from tests.helpers.sweeps import few, slow
from tests.models.test_alphafold2 import RECYCLING

MODELS = {name: f"{name}:size=tiny" for name in names() if name != "mlp"} | {
    "alphafold2": RECYCLING,
    **{name: f"{name}:size=tiny,layers=1" for name in ("bert", "t5", "vit")},
}
# The loss of the router is a product of two means over all tokens.
COUPLED = {"mixtral"}
PLANS = ("data_parallel", "tensor_parallel")
# GPT-3 has the operators of GPT-2, T5 and mBART those of two halves of BERT.
ROWS = [slow(name)[0] if name in ("gpt3", "mbart", "swin", "t5") else name for name in MODELS]


@pytest.mark.parametrize(
    "name", few(MODELS, *(n for n, name in enumerate(MODELS) if name in ("bert", "gpt2", "llama", "vit")))
)
def test_every_operator_has_a_rule(name: str) -> None:
    model = graph_of(MODELS[name]).model
    assert not model.unsupported
    built = build(MODELS[name])
    assert set(model.inputs) <= set(built.kwargs) or built.args
    assert {t.name for t in model.parameters()} == {n for n, _ in built.module.named_parameters()}


@pytest.mark.parametrize("name", ROWS)
def test_batch_and_tensor_parallel_factors_reach_the_work(name: str) -> None:
    graph = graph_of(MODELS[name])
    tensors = graph.model.tensors
    cut = {t for t in tensors if any("batch" in dim for dim in tensors[t].slots)}
    reading = [op for op in graph.forward_ops if any(o.tensor in cut for o in op.inputs)]
    assert not [op.notation() for op in reading if op.find("batch") is None]
    splits = tensor_splits(graph, 4)
    products = [op for op in graph.forward_ops if op.flops and not op.from_weights]
    left = {op.module.rpartition(".")[2] for op in products if op.name not in splits}
    # Patches of images, their merging between Swin's stages, the linear layer to the classes, and the router.
    assert left <= {"projection", "reduction", "classifier", "gate"} or name == "alphafold2"
    assert len(products) > 5


@pytest.mark.parametrize(
    ("name", "plan"), [("bert", "tensor_parallel"), *slow(("t5", "tensor_parallel"), ("swin", "data_parallel"))]
)
def test_three_models_equal_one_device(name: str, plan: str) -> None:
    assert_equal(graph_of(MODELS[name]), plan, 4)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [*PLANS, "hybrid:tp=2,pp=2,microbatches=2"])
@pytest.mark.parametrize("name", MODELS)
def test_all_models_equal_one_device(name: str, plan: str) -> None:
    graph = graph_of(MODELS[name])
    if plan not in PLANS and name in COUPLED:
        with pytest.raises(ScheduleError, match="of several microbatches, as norms and losses"):
            ss.compile(graph, plan, "local:4")
    else:
        assert ss.compile(graph, plan, "local:4").verify()["equal"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_cut_of_every_operator_gives_the_whole_result(name: str) -> None:
    built = build(MODELS[name].replace("swin:size=tiny", "swin:size=tiny,drop_path=0"))
    captured = step_of(built.module, *built.args, kwargs=built.kwargs).captured
    assert check_cuts(captured) > len(captured.model.ops)
