"""What a system runs that a program does not say: the kernel of its attention, and which operators it has fused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from superscaler.cluster import Cluster
from superscaler.cluster.devices import Speeds
from superscaler.errors import InputError, unknown
from superscaler.simulate.transfers.beside import Overlap
from superscaler.simulate.works import Kernel

# NeMo's words.
_BULK, _PIPELINED = OVERLAPS = ("bulk", "pipelined")


@dataclass(frozen=True, slots=True)
class System:
    """The assumptions of a prediction.

    attention   the kernel of fused attention, as flash1; nothing: the one that torch takes on this kind of device
    fused       norms, activations, rotary embeddings and the loss are fused, and a product adds its gradient to the sum
                of a weight, as in Megatron-LM with Transformer Engine
    overlap     communication of tensor parallelism beside products: in `bulk` beside those that do not need it, as in
                Megatron-LM, or `pipelined`, also beside those that do (transfers/beside.py); default: in bulk if fused
    """

    attention: str = ""
    fused: bool = False
    overlap: str = ""

    def __post_init__(self) -> None:
        if self.overlap not in ("", *OVERLAPS):
            raise InputError(f"--overlap: {unknown('overlap', self.overlap, OVERLAPS)}")

    def overlaps(
        self, seconds: Callable[[Kernel], float], slowdown: float, weights: Iterable[str], is_gpu: bool
    ) -> Overlap | None:
        """Return the overlap with products, None for none. `seconds`: of a kernel."""
        way = self._overlap(is_gpu)
        return Overlap(seconds, slowdown, way == _PIPELINED, frozenset(weights)) if way else None

    def _overlap(self, is_gpu: bool) -> str:
        return (self.overlap or (_BULK if self.fused else "")) if is_gpu else ""

    def speeds(self, speeds: Speeds, cluster: Cluster) -> Speeds:
        """Return the speeds of a kind of device with this system's attention. Raises InputError if it has no speeds."""
        if not self.attention:
            return speeds
        if not speeds.attentions:
            raise InputError(f"--attention {self.attention}: only one attention is known on {cluster}; leave it out.")
        if self.attention not in speeds.attentions:
            raise InputError(f"--attention on {cluster}: {unknown('attention', self.attention, speeds.attentions)}")
        return replace(speeds, attention={**speeds.attention, **speeds.attentions[self.attention]})

    def words(self, torch_compile: bool, cuda_graph: bool, is_gpu: bool) -> Iterator[str]:
        """Yield what is assumed of kernels."""
        compiled = "operators fused by Inductor" if torch_compile else "operators run one by one"
        yield "norms, activations, loss and sums of gradients fused" if self.fused else compiled
        if overlap := self._overlap(is_gpu):
            yield f"communication of tensor parallelism beside products ({overlap})"
        if is_gpu:
            yield f"attention of {self.attention}" if self.attention else "torch's attention"
        if cuda_graph:
            yield "replayed as a CUDA graph"


PLAIN = System()
