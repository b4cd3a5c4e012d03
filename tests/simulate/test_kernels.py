"""What is recorded on fake tensors is what torch does with real ones."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.compiler import compile_graph
from superscaler.ir.program import Backward, Collective, Forward, Wait
from superscaler.plans import resolve
from superscaler.simulate.kernels import Segments, Works, _orthogonal
from superscaler.simulate.rates import bytes_of, class_of
from superscaler.simulate.recording import Recorder
from superscaler.simulate.repeats.made import metas_of, tensors_of
from superscaler.simulate.works import Kernel, Segment, Tape, Work
from tests.helpers.graphs import graph_of

W, B, X, H, Y = 4 * 64 * 16, 512, 512, 4 * 8 * 64, 512


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


def _segment(plan: str = "single") -> Segment:
    net = Net()
    graph = ss.capture(net, (torch.randn(8, 16),), optimizer=torch.optim.SGD(net.parameters(), lr=0.1), check=False)
    program = compile_graph(graph, resolve(plan), ss.Cluster.local(1)).program
    code = program.devices[0].instructions
    forward = next(i for i in code if isinstance(i, Forward))
    backward = next(i for i in code if isinstance(i, Backward))
    return Segments(program).of(forward, backward)


def test_a_segment_has_the_kernels_and_the_tape_of_torch() -> None:
    segment = _segment()
    products = [k for k in segment.forward.kernels if k.name in ("mm", "addmm")]
    assert products == [
        Kernel("addmm", (((64,), "float32"), ((8, 16), "float32"), ((16, 64), "float32")), (((8, 64), "float32"),)),
        Kernel("mm", (((8, 64), "float32"), ((64, 16), "float32")), (((8, 16), "float32"),)),
    ]
    (backward,) = segment.backward
    # The input of the module wants no gradient: one product for the first layer, two for the second.
    assert sum(k.name == "mm" for k in backward.kernels) == 3
    # Autograd keeps the result of tanh and that of the second layer; x and the second weight are inputs.
    (tape,) = segment.tapes
    assert [op for _, op in tape.others] == [1, 2]
    assert tape.bytes == H + Y
    assert sorted(segment.sizes[n] for n in tape.held) == [X, W]
    (made,) = segment.gradients
    assert sorted(segment.sizes[n] for n in made.values()) == [B, W, W]
    assert sorted(segment.elements.values()) == [4 * 64, W, W]


class Normed(nn.Module):
    """A product of the norm of a product, in bfloat16."""

    def __init__(self, **norm: Any) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(16, 16, bias=False, dtype=torch.bfloat16) for _ in range(2))
        self.norm = nn.RMSNorm(16, **norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).bfloat16()).square().mean()


def _norms(module: nn.Module, on_gpu: bool) -> tuple[list[Kernel], Tape]:
    """Return the kernels of norms, and the tape."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    graph = ss.capture(module, (torch.randn(4, 8, 16).bfloat16(),), optimizer=optimizer, check=False)
    program = compile_graph(graph, resolve("single"), ss.Cluster.local(1)).program
    code = program.devices[0].instructions
    forward, backward = (next(i for i in code if isinstance(i, kind)) for kind in (Forward, Backward))
    segment = Segments(program, on_gpu).of(forward, backward)
    kernels = (k for work in (segment.forward, *segment.backward) for k in work.kernels)
    return [k for k in kernels if "norm" in k.name], segment.tapes[0]


@pytest.mark.parametrize("has_weight", [True, False])
def test_a_gpu_runs_a_root_mean_square_norm_in_one_kernel_each_way(has_weight: bool) -> None:
    """torch's own operators say which tensors they make."""
    x = torch.empty(4, 8, 16, dtype=torch.bfloat16, device="meta")
    weight = x[0, 0] if has_weight else None
    out, scale = torch.ops.aten._fused_rms_norm.default(x, [16], weight, 1e-6)
    made = torch.ops.aten._fused_rms_norm_backward.default(out, x, [16], scale, weight, [True, has_weight])
    kernels, tape = _norms(Normed(elementwise_affine=has_weight, dtype=torch.bfloat16), on_gpu=True)
    assert [k.name for k in kernels] == ["_fused_rms_norm", "_fused_rms_norm_backward"]
    assert [k.outputs for k in kernels] == [metas_of(tensors_of(some)) for some in ((out, scale), made)]
    # Both products and the norm, and the numbers of 32 rows in a block of 512 bytes.
    assert tape.bytes == 3 * 4 * 8 * 16 * 2 + 512


def test_norms_in_several_kernels_keep_float32() -> None:
    """Those of a CPU, and those of a GPU whose weight has another dtype than the input."""
    (_, fused), (none, cpu) = (_norms(Normed(dtype=torch.bfloat16), on_gpu) for on_gpu in (True, False))
    mixed, gpu = _norms(Normed(dtype=torch.float32), on_gpu=True)
    assert not [*none, *mixed]
    assert min(cpu.bytes, gpu.bytes) >= fused.bytes + 4 * 8 * 16 * 2


def test_copies_do_not_read_what_they_overwrite() -> None:
    half, wide = torch.zeros(6, dtype=torch.bfloat16), torch.zeros(6)
    with Recorder() as recorder:
        wide.copy_(half)
        torch._foreach_copy_([wide, wide], [half, half])
    assert list(map(bytes_of, recorder.kernels)) == [12 + 24, 2 * (12 + 24)]
    assert set(map(class_of, recorder.kernels)) == {"copy"}


class Dropped(nn.Module):
    """Dropout of 67 million elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1 << 13))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x[:, None] * self.weight, 0.1).sum()


@pytest.mark.parametrize(("on_gpu", "name", "count"), [(True, "mix", 1), (False, "bitwise_xor_.Tensor", 2 * 16)])
def test_random_numbers_are_recorded_in_few_kernels(on_gpu: bool, name: str, count: int) -> None:
    """A core draws them in 1024 blocks, each of which took milliseconds to record; a GPU in one kernel."""
    module = Dropped()
    graph = ss.capture(module, (torch.zeros(1 << 13),), optimizer=torch.optim.SGD(module.parameters()), check=False)
    program = ss.compile(graph, "single", "local:1").compiled.program
    kernels = [k for own in Works(program, on_gpu).of(program.devices[0]) for k in own]
    drawn = [k for k in kernels if k.name == name]
    assert len(drawn) == count
    assert sum(prod(shape) for k in drawn for shape, _ in k.outputs) == (1 if on_gpu else 2) << 26
    assert any(k.name == "bitwise_xor_.Tensor" for k in kernels) != on_gpu


def test_an_update_of_muon_has_the_products_of_torch() -> None:
    weight = nn.Parameter(torch.zeros(48, 16))
    weight.grad = torch.ones(48, 16)
    optimizer = torch.optim.Muon([weight])
    with Recorder() as ran:
        optimizer.step()
    assert [k for k in ran.kernels if k.name in ("mm", "addmm")] == [*_orthogonal(48, 16)]


def test_a_bucket_is_copied_in_and_each_result_out() -> None:
    program = ss.compile(graph_of("gpt2:size=tiny"), "zero:2,stage=1", "local:2").compiled.program
    device = program.devices[1]
    kernels = dict(zip(device.instructions[:], Works(program).of(device), strict=True))
    (bucket,) = (i for i in kernels if isinstance(i, Collective) and i.kind == "all_gather")
    assert len(kernels[bucket]) == len(bucket.ways) > 1
    waits = {i.work: kernels[i] for i in kernels if isinstance(i, Wait)}
    shapes = [[(k.name, *k.outputs) for k in waits[work]] for work in bucket.works]
    assert shapes == [[("copy_", (way.shape, "float32"))] for way in bucket.ways]


@pytest.mark.parametrize(("plan", "copies"), [("", {"copy_"}), ("gradient_accumulation:1,microbatches=2 x ", set())])
def test_what_is_gathered_along_the_sequence_is_copied_unless_the_batch_is_one(plan: str, copies: set[str]) -> None:
    graph = graph_of("gpt2:size=tiny,batch=2")
    program = ss.compile(graph, f"{plan}sequence_parallel", "local:2").compiled.program
    device = program.devices[0]
    kernels = dict(zip(device.instructions[:], Works(program).of(device), strict=True))
    exchanges = [i for i in kernels if isinstance(i, Collective) and i.dtype == "float32" and len(i.ways[0].view) == 3]
    started = {work for i in exchanges for work in i.works}
    waits = [i for i in kernels if isinstance(i, Wait) and i.work in started]
    assert {i.kind for i in exchanges} == {"all_gather", "reduce_scatter"}
    assert {k.name for i in (*exchanges, *waits) for k in kernels[i]} == copies


def test_the_peak_of_a_work_depends_on_what_others_hold() -> None:
    work = Work((), (100, 50, 120), {0: 1, 1: 3})
    assert work.peak == work.peak_of({1: 70}) == 120
    assert work.peak_of({0: 70, 1: 70}) == 100
    assert Work((), (), {}).peak == 0


def test_a_backward_frees_what_only_the_tape_holds() -> None:
    segment = _segment()
    (backward,), (tape,) = segment.backward, segment.tapes
    own = {n: segment.sizes[n] for n in tape.held}
    # The second weight is read last before the gradients of the first layer are made.
    assert backward.peak_of(own) < backward.peak


def test_views_share_the_storage_of_their_base() -> None:
    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(x).view(4, 32).t() + x.view(4, 32).t()).sum()

    net = Passing()
    graph = ss.capture(net, (torch.randn(8, 16),), optimizer=torch.optim.SGD(net.parameters(), lr=0.1), check=False)
    program = compile_graph(graph, resolve("single"), ss.Cluster.local(1)).program
    code = program.devices[0].instructions
    forward, backward = (next(i for i in code if isinstance(i, kind)) for kind in (Forward, Backward))
    segment = Segments(program).of(forward, backward)
    assert segment.tapes == (Tape(frozenset({0}), ()),)


class Softmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return ((x + self.weight).softmax(-1) * x).sum()


def test_the_backward_of_softmax_holds_one_more_tensor_on_a_gpu() -> None:
    """Measured on an H200: GPT-3 1.3B with written-out scores needs a tensor of scores more than on a CPU."""
    net = Softmax()
    graph = ss.capture(net, (torch.randn(8, 64),), optimizer=torch.optim.SGD(net.parameters(), lr=0.1), check=False)
    program = compile_graph(graph, resolve("single"), ss.Cluster.local(1)).program
    code = program.devices[0].instructions
    forward, backward = (next(i for i in code if isinstance(i, kind)) for kind in (Forward, Backward))
    on_cpu, on_gpu = (Segments(program, on_gpu).of(forward, backward).backward[0] for on_gpu in (False, True))
    assert max(on_gpu.levels) == max(on_cpu.levels) + 4 * 8 * 64
