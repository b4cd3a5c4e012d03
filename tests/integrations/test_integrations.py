"""Loops of other libraries under plans: the losses of one device, through their own checkpoints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from superscaler.errors import InputError
from superscaler.launch.launch import launch

LOOPS = Path(__file__).with_name("loops.py")
ROOT = str(LOOPS.parents[2])


def ran(world: int, library: str, kind: str, plan: str, folder: Path, stop: int = 8) -> Any:
    """Return the log of a loop on processes of this machine."""
    folder.mkdir(exist_ok=True)
    launch(LOOPS, [library, kind, plan, str(folder), str(stop)], world, folder)
    return json.loads((folder / f"log_{stop}.json").read_text())


def without_plan(library: str, kind: str, folder: Path) -> Any:
    """Return the log of a loop without a plan, on this process."""
    needed = {"huggingface": "accelerate", "lightning": "lightning"}[library]
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: pip install -e '.[{needed}]'")
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": ROOT}
    subprocess.run([sys.executable, LOOPS, library, kind, "none", folder, "8"], check=True, env=environment)
    return json.loads((folder / "log_8.json").read_text())


@pytest.mark.dist
def test_a_loop_goes_on_under_another_plan_and_with_a_last_batch_of_another_size(tmp_path: Path) -> None:
    assert max(ran(2, "own", "", "zero:stage=3+tensor_parallel", tmp_path)) < 1e-5


@pytest.mark.dist
def test_batches_of_other_shapes_train_one_copy_of_the_weights(tmp_path: Path) -> None:
    assert max(ran(2, "varied", "", "fsdp", tmp_path)) < 1e-12


@pytest.mark.slow
@pytest.mark.dist(python="real")
@pytest.mark.parametrize("kind", ["gpt2_grouped", "bert_grouped"])
def test_a_trainer_that_groups_by_length_trains_as_on_one_device(kind: str, tmp_path: Path) -> None:
    """Batches of GPT-2 are filled up to the first one, the longest; those of BERT, which looks both ways, are not."""
    expected = without_plan("huggingface", kind, tmp_path / "alone")
    found = ran(2, "huggingface", kind, "fsdp", tmp_path / "shared")
    for name, count, tolerance in (
        ("loss", 8, 1e-6),
        ("grad_norm", 8, 1e-9),
        ("weights", 2, 1e-9),
        ("eval_loss", 2, 1e-6),
    ):
        ours, theirs = ([e[name] for e in log if name in e] for log in (found, expected))
        assert (len(ours), ours) == (count, pytest.approx(theirs, rel=tolerance))


@pytest.mark.dist
def test_hooks_around_backward_and_update_have_whole_gradients_and_weights(tmp_path: Path) -> None:
    found = ran(2, "hooked", "", "zero:stage=3+data_parallel", tmp_path)
    assert max(found) < 1e-12


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("number", r"Linear\.factor was 1\.0 and is 2\.0 now"),
        ("batch", r"the batch was input_0 \(4, 6\) torch\.float32 and is input_0 \(2, 6\) torch\.float32 now"),
    ],
)
def test_what_one_rank_changes_alone_is_an_error_that_names_it(kind: str, change: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"{change} on rank 1, but rank 0 began step 2 without that change"):
        ran(2, "alone", kind, "data_parallel", tmp_path)


@pytest.mark.slow
@pytest.mark.dist(python="real")
@pytest.mark.parametrize(
    ("library", "kind", "first", "second"),
    [
        ("huggingface", "gpt2", "tensor_parallel", "zero:stage=3"),
        ("huggingface", "t5", "tensor_parallel", "zero:stage=3"),
        ("huggingface", "lora", "zero:stage=3", "data_parallel"),
        ("huggingface", "bert", "zero:stage=3", "pipeline_1f1b:microbatches=2"),
        ("lightning", "cnn", "data_parallel", "zero:stage=3"),
        ("lightning", "mlp", "tensor_parallel", "pipeline_1f1b:microbatches=2"),
    ],
)
def test_trainers_train_and_resume_as_on_one_device(
    library: str, kind: str, first: str, second: str, tmp_path: Path
) -> None:
    if kind == "lora":
        pytest.importorskip("peft")
    expected = without_plan(library, kind, tmp_path / "alone")
    found = ran(2, library, kind, first, tmp_path / "shared", 4)
    again = ran(2, library, kind, second, tmp_path / "shared")
    # Hugging Face's log has the steps before the checkpoint.
    found = again if library == "huggingface" else [*found, *again]
    losses = [e for e in found if "loss" in e]
    assert len(losses) == 8
    assert losses == [pytest.approx(e, rel=2e-5, abs=1e-6) for e in expected if "loss" in e]
    evaluations = [e for e in found if "eval_loss" in e]
    assert evaluations == [pytest.approx(e, rel=2e-5) for e in expected if "eval_loss" in e][-len(evaluations) :]
    # What callbacks find in the module at the end of an epoch, or at a validation.
    sizes = [e for e in found if "weights" in e]
    assert sizes
    assert sizes == [pytest.approx(e, rel=1e-4) for e in expected if "weights" in e]
    assert {e["drawn"] for e in found if "drawn" in e} == {e["drawn"] for e in expected if "drawn" in e}
    assert [e["total_flos"] for e in found if "total_flos" in e][-1:] == [
        e["total_flos"] for e in expected if "total_flos" in e
    ]


def test_a_trainer_refuses_what_divides_the_training_beside_the_plan(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    import transformers as hf

    from superscaler.integrations.huggingface import Trainer

    divided = accelerate.ParallelismConfig()
    args = hf.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], parallelism_config=divided)
    with pytest.raises(InputError, match="parallelism_config divides the training among the processes, which the plan"):
        Trainer(torch.nn.Linear(2, 1), args, plan="single")


@pytest.mark.slow
@pytest.mark.dist(python="real")
def test_a_trainer_has_its_own_loss_in_float32_and_none_that_changes_with_the_step(tmp_path: Path) -> None:
    expected = without_plan("huggingface", "bert_bf16", tmp_path / "alone")
    assert ran(1, "huggingface", "bert_bf16", "single", tmp_path / "planned") == [
        pytest.approx(e, rel=1e-6) for e in expected
    ]
    refused = ran(1, "huggingface", "bert_step", "single", tmp_path / "refused")
    assert re.match(r"self.state.global_step, read at .*loops.py:\d+, changes from step to step", refused)
