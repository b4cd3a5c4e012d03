"""What a system runs that a program does not say: the kernel of its attention, and which operators it has fused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from superscaler.cluster import Cluster
from superscaler.cluster.devices import Speeds
from superscaler.errors import InputError, unknown


@dataclass(frozen=True, slots=True)
class System:
    """The assumptions of a prediction.

    attention   the kernel of fused attention, as flash1; nothing: the one that torch takes on this kind of device
    fused       norms, activations, rotary embeddings and the loss are fused, and a product adds its gradient to the sum
                of a weight, as in Megatron-LM with Transformer Engine
    """

    attention: str = ""
    fused: bool = False

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
        if is_gpu:
            yield f"attention of {self.attention}" if self.attention else "torch's attention"
        if cuda_graph:
            yield "replayed as a CUDA graph"


PLAIN = System()
