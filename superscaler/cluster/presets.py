"""The kinds of device that clusters are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A model of device. `memory` in bytes; `flops` per second at the dense peak, by dtype of the matrix products."""

    name: str
    memory: int
    flops: Mapping[str, float] = field(hash=False)


GB = 10**9

# Memory is the decimal size on the data sheet, which is a little less than what the driver reports. Peaks are dense,
# without sparsity; float32 is the plain unit, not TF32.
PRESETS: Mapping[str, DeviceKind] = {
    # NVIDIA V100 Tensor Core GPU data sheet, SXM2, 32 GB. It has no bfloat16 unit.
    "v100": DeviceKind("v100", 32 * GB, {"float16": 125e12, "float32": 15.7e12}),
    # NVIDIA A100 Tensor Core GPU data sheet, SXM, 80 GB.
    "a100": DeviceKind("a100", 80 * GB, {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}),
    # NVIDIA H100 Tensor Core GPU data sheet, SXM, 80 GB; it prints the peak with sparsity, which is twice this.
    "h100": DeviceKind("h100", 80 * GB, {"bfloat16": 989.5e12, "float16": 989.5e12, "float32": 67e12}),
    # NVIDIA H200 Tensor Core GPU data sheet, SXM, 141 GB; same chip as the H100.
    "h200": DeviceKind("h200", 141 * GB, {"bfloat16": 989.5e12, "float16": 989.5e12, "float32": 67e12}),
}

# Processes on the machine at hand, on whatever device torch finds there: nothing is known about it beforehand.
LOCAL = "local"
