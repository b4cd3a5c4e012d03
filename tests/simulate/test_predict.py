"""Predictions of whole plans, from the command line and from Python."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import superscaler as ss
from superscaler.certify.certificate import certify
from superscaler.cli.train import _more_memory
from superscaler.compiler import compile_graph
from superscaler.errors import InputError
from superscaler.ir.program import Program
from superscaler.materialize.joined.join import joined
from superscaler.plans import resolve
from superscaler.runtime.optimizer import LISTED
from superscaler.simulate.kernels import Works
from superscaler.simulate.predict import predict, simulate
from superscaler.simulate.prediction import words
from superscaler.simulate.rates import flops_of, needed_of, products_of
from superscaler.simulate.segments import model_flops, products
from superscaler.simulate.times import Floats
from superscaler.simulate.works import block
from tests.helpers.commands import answer, run
from tests.helpers.graphs import graph_of
from tests.helpers.sweeps import slow

GPT = "gpt2:size=tiny"


def test_a_plan_that_is_only_simulated_is_not_certified_until_it_is_saved(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certified = list[Program]()
    for room in ("compiler", "plan"):
        monkeypatch.setattr(
            f"superscaler.{room}.certify", lambda program: certified.append(program) or certify(program)
        )
    model, spec = f"{GPT},batch=16", "pipeline_1f1b:2,microbatches=16"
    answer(capsys, "simulate", model, "--plan", spec, "--cluster", "a100:1x2")
    assert not certified
    compiled = compile_graph(graph_of(model), resolve(spec), ss.Cluster.preset("a100", 1, 2), certified=False)
    plan = ss.Plan(compiled)
    assert not certified
    plan.save(tmp_path / "plan", evaluation=False)
    assert certified[0] is compiled.program
    # The answer is that of the program which is certified.
    assert ss.compile(graph_of(model), spec, "a100:1x2").compiled.program == compiled.program


def test_the_operations_of_a_model_are_those_of_the_formula() -> None:
    layers, hidden, batch, seq, vocabulary = 2, 64, 8, 32, 512
    # Narayanan et al. 2021: three times the forward, whose products of attention count all scores.
    layer = 24 * batch * seq * hidden**2 * (1 + seq / (6 * hidden))
    wanted = 3 * (layers * layer + 2 * batch * seq * hidden * vocabulary)
    assert model_flops(graph_of(GPT).model) == {"float32": wanted}


def test_a_prediction_adds_up_and_says_what_fits() -> None:
    plan = ss.compile(graph_of(GPT), "hybrid:dp=2,tp=2,pp=2,microbatches=4", "a100:1x8")
    found = plan.simulate()
    for d in found.devices:
        parts = d.compute + d.optimizer + d.launch + d.communication + d.copies + d.bubble
        assert parts == pytest.approx(found.step_seconds, rel=1e-6)
        assert sum(d.memory.values()) == d.peak_bytes
    assert found.world == 8
    assert found.low < found.step_seconds < found.high
    # Eight devices wait for the slowest of them, which is slower than one in the middle.
    assert found.step_seconds > 0.2 * found.low + 0.8 * found.high
    assert found.fits
    small = plan.simulate(capacity=10**6)
    assert not small.fits
    assert words(small).startswith("does not fit: ")
    # Layers of 64 numbers: the host takes longer to start kernels than the device to run them.
    assert all(0.3 < d.host / d.compute < 1 for d in found.devices)
    assert "launch-bound" in words(found)
    assert "launch-bound" not in words(replace(found, devices=tuple(replace(d, host=0.0) for d in found.devices)))


def test_numbers_of_a_model_that_is_too_small_for_its_devices_are_left_out(tmp_path: Path) -> None:
    """They frighten, and say nothing: 0.0 TFLOPS, devices that wait for 114 % of their work, a step of equal bounds, a
    step of 964,000,000 times what the hardware allows.
    """
    plan = ss.compile(graph_of("mlp:hidden=4,inputs=4,layers=1,batch=2,classes=2"), "data_parallel", "a100:1x2")
    found = plan.simulate()
    assert found.mean("host") > found.mean("compute") + found.mean("optimizer")
    text = words(replace(found, low=found.step_seconds, high=found.step_seconds))
    (step,) = (line for line in text.splitlines() if line.startswith("  step"))
    assert re.fullmatch(r"  step \d+ us, under 1% of peak FLOPs, [\d,]+ samples/s", step)
    assert "launch-bound: for 100% of their work" in text
    plan.save(tmp_path / "plan", evaluation=False)
    assert run("report", tmp_path / "plan", "--out", tmp_path / "plan.html") == 0
    answered = (tmp_path / "plan.html").read_text().partition("What limits it: ")[2].partition("</p>")[0]
    assert "of the step in the mean over devices." in answered


def test_the_parts_of_a_step_are_said_in_seconds_that_add_up_and_so_is_what_is_assumed() -> None:
    found = ss.compile(graph_of(GPT), "data_parallel", "a100:1x2").simulate()
    text = words(replace(found, devices=tuple(replace(d, host=0.0) for d in found.devices)))
    (line,) = (line for line in text.splitlines() if "the model's own products take" in line)
    units = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    said = [float(count) * units[unit] for count, unit in re.findall(r"([\d.]+) (us|ms|s)\b", line)]
    assert said[0] == pytest.approx(found.bound, rel=0.01)
    assert sum(said) == pytest.approx(found.step_seconds, rel=0.03)
    assert "assumed: operators run one by one, torch's attention" in text


def test_the_kernel_of_attention_and_fused_operators_are_assumptions() -> None:
    plan = ss.compile(graph_of(GPT), "gradient_accumulation:microbatches=2", "a100:1x1")
    plain, compiled, fused = (
        plan.simulate(),
        plan.simulate(system=ss.System(torch_compile=True)),
        plan.simulate(system=ss.System(fused=True)),
    )
    # Sums of gradients are in the products.
    assert fused.step_seconds < compiled.step_seconds < plain.step_seconds
    assert fused.assumed.startswith("norms, activations, loss and sums of gradients fused")
    assert plan.simulate(system=ss.System(attention="flash1")).assumed.endswith("attention of flash1")
    with pytest.raises(
        InputError, match=r"--attention on a100:1x1: unknown attention 'flash3'.* Known: flash1, flash2,"
    ):
        plan.simulate(system=ss.System(attention="flash3"))
    lab = "{preset: local, servers: 1, devices_per_server: 1, device: {memory: 1e9, flops: {}, speeds: "
    measured = ss.compile(graph_of(GPT), "single", lab + "{products: {float32: 1e9}, memory: 1e10}}}")
    with pytest.raises(InputError, match="--attention flash1: only one attention is known on"):
        measured.simulate(system=ss.System(attention="flash1"))


@pytest.mark.parametrize("is_compiled", [False, *slow(True)])
def test_the_busiest_device_of_experts_sets_the_pace(is_compiled: bool) -> None:
    """Forward and backward of experts take as much longer, and what they keep is as much more."""
    sizes = "layers=1,hidden=256,mlp=1024,experts=8,seq=512,batch=64,balance=0,vocab=64,device=meta"
    graph = graph_of(f"mixtral:size=tiny,{sizes}")
    alone, plan = (ss.compile(graph, spec, "a100:1x4") for spec in ("data_parallel", "expert_parallel"))
    even, busy = (plan.simulate(system=ss.System(torch_compile=is_compiled, balance=b)) for b in (1.0, 1.5))
    assert "as many tokens for each expert" in even.assumed
    assert "1.5 times the mean tokens for the experts of the busiest device" in busy.assumed
    kernels = [
        [
            k
            for own in Works(
                joined(plan.compiled.program) if is_compiled else plan.compiled.program, True, is_compiled, balance=b
            ).of(plan.compiled.program.devices[0])
            for k in own
        ]
        for b in (1.0, 1.5)
    ]
    operations = [sum(prod(p) for k in own for p in products_of(k)) for own in kernels]
    # Two choices a token, three products forward and six backward, over all devices' tokens; a quarter of them is here.
    experts = 9 * 2 * 64 * 512 * 256 * 1024 // 4
    assert operations[1] - operations[0] == pytest.approx(0.5 * experts, rel=0.01)
    assert busy.step_seconds > even.step_seconds
    if not is_compiled:
        rows = 2 * 64 * 512 // 4
        kept = busy.fullest.memory["activations"] - even.fullest.memory["activations"]
        assert kept > 0.5 * rows * 4 * 1024 * 2
    # Where each device has all experts, none is busier.
    assert alone.simulate(system=ss.System(balance=1.5)).step_seconds == alone.simulate().step_seconds


def test_a_balance_that_a_plan_does_not_have_is_refused() -> None:
    mixtral = graph_of("mixtral:size=tiny,layers=1,experts=4,batch=8")
    with pytest.raises(InputError, match=r"experts of this plan have as many rows.* expert_parallel:capacity=1\.3\."):
        ss.compile(mixtral, "expert_parallel:capacity=2.0", "a100:1x2").simulate(system=ss.System(balance=1.3))
    plan = ss.compile(graph_of(GPT), "single", "a100:1x1")
    with pytest.raises(InputError, match="the model has no mixture of experts; leave it out"):
        plan.simulate(system=ss.System(balance=1.3))
    with pytest.raises(InputError, match=r"--balance 0\.5: give 1 \(as many tokens each\) or more"):
        plan.simulate(system=ss.System(balance=0.5))


def test_products_of_a_dtype_without_a_speed_take_the_slowest_one() -> None:
    lab = "{preset: local, servers: 1, devices_per_server: 1, device: {memory: 1e9, flops: {}, speeds: "
    speeds = ("{products: {" + dtype + ": 1e9}, memory: 1e10}}}" for dtype in ("float32", "bfloat16"))
    graph = graph_of("mlp:layers=1,hidden=8")
    known, unknown = (ss.compile(graph, "single", lab + some).simulate() for some in speeds)
    assert (unknown.step_seconds, unknown.bound) == (known.step_seconds, known.bound)
    # No share of a peak that is not known.
    assert known.as_json()["mfu"] is None


def test_an_optimizer_on_the_host_takes_the_time_of_its_memory() -> None:
    """Measured on an H200 with 16 cores: 1.8 s for the 1.3 billion weights of GPT-3, 20 GB/s."""
    graph = graph_of("mlp:layers=4,hidden=2048,device=meta")
    plain, swapped = (ss.compile(graph, plan, "h200:1x1").simulate() for plan in ("single", "swap:what=optimizer"))
    weights = sum(prod(t.shape) for t in graph.model.parameters())
    more = swapped.mean("optimizer") - plain.mean("optimizer")
    assert more == pytest.approx(28 * weights / 16e9, rel=0.1)


class Chain(torch.nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


@pytest.mark.parametrize(("fused", "bytes_of_an_element"), [(True, 28), (None, 80)])
def test_a_gpu_updates_with_adam_by_lists_unless_it_is_fused(fused: bool | None, bytes_of_an_element: int) -> None:
    """Measured on an H200: 80 bytes an element and 28.9 ms for GPT-3 1.3B; its peak then held 4 more bytes each."""
    with torch.device("meta"):
        module = Chain(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(8)))
        graph = ss.capture(
            module, (torch.ones(1, 4096),), {}, torch.optim.AdamW(module.parameters(), fused=fused), check=False
        )
    found = simulate(ss.compile(graph, "single", "h200:1x1").compiled.program, ss.Cluster.parse("h200:1x1"))
    weights = 8 * 4096**2
    kind = ss.Cluster.parse("h200:1x1").device_kind
    assert kind is not None
    assert kind.speeds is not None
    speed = kind.speeds.operators["elementwise"].bandwidth
    assert found.prediction.mean("optimizer") == pytest.approx(bytes_of_an_element * weights / speed, rel=0.05)
    # Weights, gradients and two states; a list of 256 MB has temporary tensors.
    expected = 16 * weights + (0 if fused else LISTED)
    assert found.memories[0].peak == pytest.approx(expected, rel=0.01)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(64, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x * self.scale
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).sum()


def test_each_device_of_a_ring_computes_the_blocks_that_it_sees() -> None:
    module = Attention()
    x = torch.empty(1, 8, 32768, 64, device="meta")
    graph = ss.capture(module, (x,), optimizer=torch.optim.SGD(module.parameters()), check=False)

    def compute(spec: str) -> Floats:
        found = ss.compile(graph, spec, "h100:1x4").compiled
        return simulate(found.program, found.cluster).table.compute

    plain, zigzag = compute("ring_attention:4"), compute("ring_attention:4,zigzag=true")
    # Device i sees i blocks of keys, and half of its own one. The rest of its work is that of all.
    one, *more = np.diff(plain)
    assert one > 0.1 * plain[0]
    assert more == pytest.approx([one, one], rel=0.01)
    assert zigzag == pytest.approx(np.full(4, zigzag[0]), rel=0.02)
    assert zigzag[0] < plain[-1]
    # The bound leaves out the scores that the mask hides: a query sees no later key.
    hidden = sum(times * (flops_of(kernel) - needed_of(kernel)) for kernel, times in products(graph.model))
    assert hidden == 3 * 4 * 8 * 64 * 32768 * 32767 / 2


PACKED = "llama:size=tiny,layers=1,seq=256,batch=2,documents=128+64+64"


def test_attention_is_priced_by_the_documents_of_rows() -> None:
    """Two rows of four heads, on four devices of a ring: each has 64 queries of each row."""
    plan = ss.compile(graph_of(PACKED), "ring_attention", "h100:1x4")
    whole, inside = (
        plan.simulate(system=ss.System(documents=(256,))).attention,
        plan.simulate(system=ss.System(documents=(128, 64, 64))).attention,
    )
    assert whole is not None
    assert inside is not None
    own = 64 * 65 // 2
    assert whole.scores == tuple(2 * 4 * (own + n * 64 * 64) for n in range(4))
    assert inside.scores == tuple(2 * 4 * (own + n * 64 * 64) for n in (0, 1, 0, 0))
    assert inside.imbalance == pytest.approx((own + 64 * 64) / (own + 64 * 64 / 4))
    assert max(inside.seconds) == inside.seconds[1] < max(whole.seconds)
    assert plan.simulate().attention is None


@pytest.mark.slow
def test_chunks_of_a_ring_are_priced_by_the_documents_of_rows() -> None:
    even = ss.compile(graph_of(PACKED), "ring_attention:zigzag=documents,documents=128+64+64,chunks=4", "h100:1x2")
    found = even.simulate(system=ss.System(documents=(128, 64, 64)))
    assert found.attention is not None
    assert found.attention.imbalance < 1.01


def test_documents_are_given_to_a_model_that_has_some(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = ["--plan", "tensor_parallel", "--cluster", "a100:1x2", "--documents", "128,64,64"]
    printed, _ = answer(capfd, "simulate", "llama:size=tiny,layers=1,seq=256,batch=2", *given)
    assert "rows of documents of 128, 64, 64 tokens" in printed["assumed"]
    inside = (128 * 129 // 2 + 2 * 64 * 65 // 2) * 2 * 4 // 2
    assert printed["attention"]["scores"] == [inside, inside]
    ss.compile(graph_of(PACKED), "tensor_parallel", "a100:1x2").save(tmp_path / "plan", evaluation=False)
    printed, _ = answer(capfd, "simulate", str(tmp_path / "plan"), "--documents", "64")
    assert printed["attention"]["scores"] == [4 * 64 * 65 // 2 * 2 * 4 // 2] * 2
    # A CUDA graph has one shape for all packings.
    printed, _ = answer(capfd, "simulate", str(tmp_path / "plan"), "--documents", "64", "--cuda-graph")
    assert printed["attention"]["scores"] == [256 * 256 * 2 * 4 // 2] * 2
    with pytest.raises(InputError, match="--documents 64: the model has no attention inside documents; give one with"):
        ss.compile(graph_of(GPT), "tensor_parallel", "a100:1x2").simulate(system=ss.System(documents=(64,)))
    with pytest.raises(InputError, match=r"documents=\[64, 0\]: a document has one token or more"):
        ss.compile(graph_of(PACKED), "tensor_parallel", "a100:1x2").simulate(system=ss.System(documents=(64, 0)))


def test_the_command_says_whether_a_plan_fits_in_its_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    given = ["simulate", GPT, "--plan", "zero:4,stage=1", "--cluster", "a100:1x4"]
    printed, _ = answer(capfd, *given, "--compare", "data_parallel")
    assert printed["fits"]
    assert printed["step_seconds"] > 0
    assert set(printed["plans"]) == {"zero:4,stage=1", "data_parallel"}
    assert "plans" not in answer(capfd, *given, "--memory", "1MB", code=1)[0]
    small = ["simulate", "mlp", "--plan", "single", "--cluster", "a100:1x1"]
    plain, compiled = (answer(capfd, *small, *more)[0]["step_seconds"] for more in ((), ("--torch-compile",)))
    assert compiled < plain


def test_a_saved_plan_is_predicted_on_another_cluster_of_its_size(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = ss.compile(graph_of("mlp:layers=1,hidden=8"), "data_parallel", "local:2")
    plan.save(tmp_path / "plan", evaluation=False)
    given = "simulate", tmp_path / "plan"
    assert run(*given) == 2
    assert "nothing is known about the speed of local:2" in capfd.readouterr().err
    found, _ = answer(capfd, *given, "--cluster", "a100:1x2")
    fused, _ = answer(capfd, *given, "--cluster", "a100:1x2", "--torch-compile")
    assert fused["devices"][0]["compute"] <= found["devices"][0]["compute"]
    wanted = predict(plan.compiled.program, ss.Cluster.parse("a100:1x2"))
    assert (found["cluster"], found["step_seconds"]) == ("a100:1x2", wanted.step_seconds)
    for option, why in (
        (("--cluster", "a100:1x4"), f"{tmp_path / 'plan'} is for 2 devices, but a100:1x4 has 4"),
        (("--precision", "bf16"), "is a saved plan, which has its --precision; leave it out"),
    ):
        assert run(*given, *option) == 2
        assert why in capfd.readouterr().err
    assert run("validate", tmp_path / "plan", "--cluster", "local:2") == 2
    assert "which has its --cluster" in capfd.readouterr().err


REFUSED = [
    ("heads=10,hidden=40", "hybrid:tp=4", "heads=10 is not divisible by tp=4; give heads=8 or 12, or choose tp from"),
    ("batch=12", "hybrid:dp=2,tp=2,microbatches=4", "batch=12 is not divisible by dp=2 x microbatches=4; give batch=8"),
    ("batch=3", "hybrid:pp=4,microbatches=8", "microbatches=8 of a batch of 3; choose 1 to 3"),
    ("seq=30", "hybrid:tp=4,sequence=true", "seq=30 is not divisible by tp=4; give seq=28 or 32"),
    ("layers=8", "hybrid:pp=4,chunks=2,microbatches=6", "6 microbatches do not come in rounds of 4"),
    ("layers=2", "hybrid:tp=2", "mesh pp=1,dp=1,tp=2 needs 2 devices, but there are 4"),
    ("batch=3", "data_parallel", "batch=3 is not divisible by devices=4; give batch=4, or choose"),
    ("batch=8", "hybrid:dp=4,microbatches=0", "microbatches=0 of a batch of 8; choose 1 to 8"),
    ("batch=8", "fsdp:microbatches=0", "microbatches=0 of a batch of 8"),
    (
        "batch=8",
        "tensor_parallel:4 x data_parallel:2",
        "mesh tensor_parallel=4,data_parallel=2 needs 8 devices",
    ),
    ("batch=8", "pipeline_1f1b:stages=8", "pipeline:stages=8 on 4 devices; give chunks"),
    ("batch=8", "fsdp:microbatches=4", "batch=8 is not divisible by devices=4 x microbatches=4; give batch=16"),
]


@pytest.mark.parametrize(("sizes", "plan", "why"), REFUSED)
def test_sizes_that_no_plan_shares_are_refused_before_the_model_is_built(
    sizes: str, plan: str, why: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("superscaler.models.build")
    assert run("simulate", f"gpt3:size=tiny,{sizes}", "--plan", plan, "--cluster", "a100:1x4", "--json") == 2
    out, err = capfd.readouterr()
    assert len(err.splitlines()) == 1
    assert err == f"error: {json.loads(out)['error']}\n"
    assert why in err


def test_devices_of_unknown_speed_are_refused_before_the_model_is_built(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("superscaler.models.build")
    assert run("simulate", GPT, "--plan", "data_parallel", "--cluster", "local:2") == 2
    assert "--cluster local:2: nothing is known about the speed of local:2; measure" in capfd.readouterr().err


def test_a_plan_that_does_not_fit_comes_with_the_command_that_finds_others(capfd: pytest.CaptureFixture[str]) -> None:
    given = ["simulate", GPT, "--plan", "data_parallel", "--cluster", "a100:1x4"]
    assert run(*given, "--memory", "1MB") == 1
    assert f"superscaler search {GPT} --cluster a100:1x4" in capfd.readouterr().out
    assert run(*given) == 0
    assert "search" not in capfd.readouterr().out


def test_training_says_when_a_gpu_needed_more_than_predicted(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ss.compile(graph_of(GPT), "single", "local:1")
    assert plan.peak_bytes > 10**6
    assert not list(_more_memory(plan, 10 * plan.peak_bytes))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert not list(_more_memory(plan, plan.peak_bytes))
    (line,) = _more_memory(plan, 2 * plan.peak_bytes)
    assert "2.00 times the predicted" in line


def test_gradients_that_a_system_sums_in_16_bits_take_half_of_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Where several microbatches are summed, every device has a gradient of each weight: float32 numbers, or halves.
    A plan that sends float32, and a model without halves, have no such sums.
    """
    model, spec = f"{GPT},layers=1,batch=8,seq=16", "zero:4,stage=1,shard=2,microbatches=2,halves=true"
    ask = ("simulate", model, "--cluster", "a100:2x2", "--plan")
    wide, narrow = (answer(capsys, *ask, spec, *more)[0] for more in ((), ("--sum-halves",)))
    shapes = [p.shape for p in graph_of(model).captured.call.module.parameters()]
    most = [each["devices"][0]["memory"]["gradients"] for each in (wide, narrow)]
    assert most[1] == sum(block(2 * prod(shape)) for shape in shapes)
    assert most[0] == sum(block(4 * prod(shape)) for shape in shapes)
    assert narrow["step_seconds"] <= wide["step_seconds"]
    assert "gradients summed in 16 bits" in narrow["assumed"]
    sent = spec.replace(",halves=true", "")
    plain, asked = (answer(capsys, *ask, sent, *some)[0] for some in ((), ("--sum-halves",)))
    assert plain == asked
    full = ss.compile(graph_of(model), spec, "a100:2x2")
    told = [full.simulate(system=ss.System(sum_halves=way)) for way in (False, True)]
    assert told[0].step_seconds == told[1].step_seconds
    assert told[0].fullest.memory == told[1].fullest.memory
