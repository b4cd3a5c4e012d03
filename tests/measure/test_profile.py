"""Speeds of a core from measured kernels: those that made the seconds come back, through the text of a cluster."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import cycle

import pytest
import torch

from superscaler.cluster import PRESETS, Cluster, DeviceKind, Link
from superscaler.cluster.devices import Attention, Speeds
from superscaler.measure import profile, profile_gpu
from superscaler.measure.profile import Sample
from superscaler.simulate.rates import seconds
from superscaler.simulate.works import Kernel, Meta

CORE = Speeds(
    units=0,
    products={"float32": (9e10, 9e10), "bfloat16": (2e11, 2e11)},
    memory=(2e10, 2e10),
    attention={
        "forward float32": Attention({64: (6e10, 6e10), 128: (7e10, 7e10)}, tile=512),
        "backward float32": Attention({64: (5e10, 5e10), 128: (6e10, 6e10)}, tile=512),
    },
    operators={
        "product float32": Link(5e-6, 1.5e10),
        "product bfloat16": Link(4e-5, 8e9),
        "gelu float32": Link(8e-6, 8e9),
        "sum columns float32": Link(6e-6, 1e10),
    },
    floor=1e-5,
    fresh=2e9,
)
KIND = DeviceKind("local", 8 * 10**9, {"float32": 9e10}, CORE)


def meta(*shape: int, dtype: str = "float32") -> Meta:
    return shape, dtype


def kernels() -> list[Kernel]:
    found = []
    for rows, columns in ((8, 64), (128, 256), (1024, 512), (1024, 2048)):
        x, sums = meta(rows, columns), meta(1, columns)
        found += [Kernel("gelu", (x,), (x,)), Kernel("add.Tensor", (x, x), (x,)), Kernel("mul.Tensor", (x, x), (x,))]
        found += [Kernel("sum.dim_IntList", (x,), (sums,)), Kernel("_unsafe_view", (x,), (x,))]
        for dtype in ("float32", "bfloat16"):
            for k in (32, 512):
                read = meta(rows, k, dtype=dtype), meta(k, columns, dtype=dtype)
                found.append(Kernel("mm", read, (meta(rows, columns, dtype=dtype),)))
    for heads, keys, channels in ((8, 64, 32), (8, 256, 64), (12, 512, 128), (4, 1024, 96)):
        q, more = meta(2, heads, keys, channels), meta(2, heads, keys)
        name = "_scaled_dot_product_flash_attention_for_cpu"
        found.append(Kernel(name, (q, q, q), (q, more), causal=True))
        found.append(Kernel(f"{name}_backward", (q, q, q, q, q, more), (q, q, q), causal=True))
    return found


def kernels_named(name: str) -> list[Kernel]:
    return [k for k in kernels() if k.name == name]


def test_speeds_come_back_from_the_seconds_that_they_give() -> None:
    samples = [Sample(k, seconds(k, KIND)) for k in kernels()]
    found = replace(KIND, speeds=profile.speeds(samples, 1e-5, 2e9))
    assert profile.errors(samples, found) < 0.01
    for sample in samples:
        # A kernel of attention has an alpha of its own where it was made with a floor.
        assert seconds(sample.kernel, found) == pytest.approx(sample.seconds, rel=0.05)
    assert found.speeds is not None
    assert found.speeds.products["float32"] == pytest.approx(CORE.products["float32"], rel=1e-3)
    assert found.speeds.operators["gelu float32"].bandwidth == pytest.approx(8e9, rel=1e-3)
    # In a dtype that was not measured, an element takes as long.
    x = meta(1024, 512, dtype="float16")
    assert seconds(Kernel("gelu", (x,), (x,)), found) == pytest.approx(seconds(kernels_named("gelu")[2], found))
    # Operators that were not measured run as the elementwise ones do on average.
    unknown, *others = (Kernel(n, (meta(1024, 512),), (meta(1024, 512),)) for n in ("erfinv", "add.Tensor", "gelu"))
    fast, slow = (seconds(k, found) for k in others)
    assert fast < seconds(unknown, found) < slow


def test_the_error_of_a_fit_is_that_of_its_speeds() -> None:
    samples = [Sample(k, seconds(k, KIND) * factor) for k, factor in zip(kernels(), cycle((0.9, 1.1)))]
    found = profile.speeds(samples, 1e-5, 2e9)
    error = profile.errors(samples, replace(KIND, speeds=found))
    assert 0.005 < error < 0.12
    wide = replace(KIND, speeds=profile.widened(found, error))
    for kernel in kernels():
        if kernel.name in ("mm", "add.Tensor"):
            slow, middle, fast = (seconds(kernel, wide, share) for share in (0.0, 0.5, 1.0))
            assert slow > middle > fast
            assert middle == pytest.approx(seconds(kernel, replace(KIND, speeds=found)), rel=1e-3)


def test_a_profile_is_read_back_from_its_cluster() -> None:
    cluster = Cluster.of("measured", "local", 1, 2, None, KIND)
    assert Cluster.parse(str(cluster)) == cluster
    assert Cluster.parse(str(cluster)).device_kind == KIND


def test_samples_are_read_back_from_json() -> None:
    for kernel in kernels():
        sample = Sample(kernel, 1.5)
        assert Sample.read(asdict(sample)) == sample


def test_kernels_are_timed_with_their_shapes() -> None:
    x = torch.randn(256, 128)
    with profile.Timer() as timer:
        y = torch.nn.functional.gelu(x @ x.T, approximate="tanh")
        y.view(-1)
    product, gelu = (s for s in timer.found if s.kernel.name != "detach")
    assert product.kernel == Kernel("mm", (meta(256, 128), meta(128, 256)), (meta(256, 256),))
    assert gelu.kernel.name == "gelu_tanh"
    assert 0 < product.seconds < 1


def test_the_measured_models_have_the_kernels_of_a_step() -> None:
    run = profile.models(*profile.SIZES[0], "float32")
    with profile.Timer() as timer:
        run()
    names = {s.kernel.name.partition(".")[0] for s in timer.found}
    assert names >= {
        "mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu", "native_layer_norm_backward", "gelu_tanh",
        "embedding_dense_backward", "nll_loss_backward", "_log_softmax_backward_data", "_fused_adamw_", "add_", "silu",
    }  # fmt: skip
    update = next(s.kernel for s in timer.found if s.kernel.name == "_fused_adamw_")
    weights = len(update.outputs) // 3
    # Weights, gradients, two states and the number of the step are read; weights and states are written.
    assert len(update.inputs) == 5 * weights
    assert update.outputs == update.inputs[:weights] + update.inputs[2 * weights : 4 * weights]


GPU = PRESETS["h200"].device


def gpu_kernels() -> list[Kernel]:
    found = []
    for dtype in ("float32", "bfloat16"):
        for rows, columns in ((8192, 4096), (16384, 8192)):
            x = meta(rows, columns, dtype=dtype)
            found += [Kernel("add.Tensor", (x, x), (x,)), Kernel("clone", (x,), (x,)), Kernel("gelu", (x,), (x,))]
            found += [Kernel("_softmax", (x,), (x,)), Kernel("sum.dim_IntList", (x,), (meta(1, columns, dtype=dtype),))]
            for k in (2048, 8192):
                read = meta(rows, k, dtype=dtype), meta(k, columns, dtype=dtype)
                found.append(Kernel("mm", read, (meta(rows, columns, dtype=dtype),)))
        for heads, channels in ((32, 64), (16, 128)):
            q, more = meta(4, heads, 4096, channels, dtype=dtype), meta(4, heads, 4096)
            name = "_scaled_dot_product_cudnn_attention"
            found.append(Kernel(name, (q, q, q), (q, more), causal=True))
            found.append(Kernel(f"{name}_backward", (q, q, q, q, q, more), (q, q, q), causal=True))
    return found


def test_speeds_of_a_gpu_come_back_from_the_seconds_that_they_give() -> None:
    """From the form of another GPU, without its speeds."""
    samples, like = [Sample(k, seconds(k, GPU)) for k in gpu_kernels()], PRESETS["v100"].device.speeds
    assert like is not None
    form = replace(like, attention={d: replace(t, rates={}) for d, t in GPU.speeds.attention.items()})  # type: ignore[union-attr]
    found = replace(GPU, speeds=profile_gpu.speeds(samples, form, units=132, floor=2e-6, issue=24e-6))
    assert found.speeds is not None
    assert found.speeds.issue == 24e-6
    assert profile.errors(samples, found) < 0.01
    for sample in samples:
        assert seconds(sample.kernel, found) == pytest.approx(sample.seconds, rel=0.03)
    # An operator that was not measured runs as the others of its class do.
    x = meta(8192, 4096)
    assert seconds(Kernel("tanh", (x,), (x,)), found) == pytest.approx(
        seconds(Kernel("tanh", (x,), (x,)), GPU), rel=0.03
    )
    half = meta(8192, 8192, dtype="float16")
    product = Kernel("mm", (half, half), (half,))
    assert seconds(product, found) == pytest.approx(seconds(product, GPU), rel=0.03)


def test_short_kernels_of_a_gpu_say_nothing_of_its_speeds() -> None:
    samples = [Sample(k, seconds(k, GPU)) for k in gpu_kernels()]
    x = meta(8, 8)
    short = [Sample(Kernel("add.Tensor", (x, x), (x,)), 1.9e-5), Sample(Kernel("mm", (x, x), (x,)), 1.9e-5)]
    assert GPU.speeds is not None
    first, second = (profile_gpu.speeds(some, GPU.speeds, 132, 2e-6, 7e-6) for some in (samples, samples + short))
    assert first == second


def test_kernels_whose_seconds_do_not_depend_on_their_sizes_have_speeds_too() -> None:
    """Of the smallest models, noise may leave none."""
    samples = [Sample(kernel, 1e-5) for kernel in kernels()]
    found = profile.speeds(samples, CORE.floor, CORE.fresh)
    kind = replace(KIND, speeds=found)
    assert all(seconds(k, kind) == pytest.approx(1e-5, rel=1e-3) for k in kernels_named("mm"))
