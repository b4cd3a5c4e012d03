"""What is recorded on fake tensors is what torch does with real ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.compiler import compile_graph
from superscaler.ir.program import Backward, Forward
from superscaler.plans import resolve
from superscaler.simulate.kernels import Kernel, Segment, Segments


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


def _segment(plan: str = "single") -> Segment:
    net = Net()
    graph = ss.capture(net, (torch.randn(8, 16),), optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    program = compile_graph(graph, resolve(plan), ss.Cluster.local(1)).program
    code = program.devices[0].instructions
    forward = next(i for i in code if isinstance(i, Forward))
    backward = [i for i in code if isinstance(i, Backward)]
    first = [made is not None for made in backward[0].outputs] if backward[0].half else ()
    return Segments(program).of(forward, backward[-1], first)


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
    assert segment.tape == (4 * (8 * 64 + 8 * 16),)
    assert len(segment.inputs) == 2
    assert sorted(segment.gradients) == sorted([4 * 64 * 16, 4 * 64, 4 * 64 * 16])
