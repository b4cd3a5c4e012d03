"""`superscaler doctor --measure`: times collectives and kernels on this machine, and writes a cluster that explains
them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from superscaler.cli.printing import Printer, table
from superscaler.errors import InputError
from superscaler.specs.file_errors import writing
from superscaler.timing import cores

if TYPE_CHECKING:
    from superscaler.cluster import Cluster, DeviceKind
    from superscaler.cluster.fit import Sample

_ENDINGS = (".yaml", ".yml")
# Processes without --cluster: more take long on a CPU and add little.
_USUAL = 4
_MOST = 64
# What else `measure` is given: how many sizes of models; how many sizes of collectives, and repetitions of each.
_MODELS: Sequence[str] = ()
_COLLECTIVES: Sequence[str] = ()
_NUMBERS = ("bytes", "start us", "measured us", "fitted us", "error")


def check_alone(spec: str | None, out: Path | None) -> None:
    """Raise InputError for an option that belongs to measurements only."""
    given = "--out" if out is not None else "--cluster" if spec is not None else None
    if given:
        raise InputError(f"{given} is for a measurement; add --measure.")


def measure(printer: Printer, spec: str | None, out: Path | None) -> None:
    """Measure, show measured beside fitted, and write the file. Raises InputError before anything is started."""
    if out is not None:
        _check_out(out)
    count = _count(spec)
    from superscaler.cluster import LINKS, LOCAL, Cluster
    from superscaler.cluster.fit import Sample, error, fit, predict, slowdown
    from superscaler.comm.measure import measure as measure_links
    from superscaler.launch.launch import call

    device = _device(printer, count)
    rows = call(measure_links, count, *_COLLECTIVES)[0]
    samples = [Sample(**{**found, "group": tuple(found["group"])}) for found in rows]
    samples.sort(key=lambda s: (s.link, s.kind, s.size))
    if device is not None and device.speeds is not None and device.speeds.units == 0:
        device = replace(device, speeds=replace(device.speeds, slowdown=slowdown(samples)))
    cluster = Cluster.of("measured", LOCAL, 1, count, fit(samples, LINKS[LOCAL]), device)
    largest = max(error(cluster.links, s) for s in samples)
    fitted = [predict(cluster.links, s) for s in samples]
    shown = table(("collective", *_NUMBERS), map(_row, samples, fitted), _NUMBERS)
    printer.show(shown, f"largest error {largest:.0%}, {count} processes", *_links(cluster))
    if out is not None:
        _write(out, cluster)
        printer.show(f"wrote {out}; use it as --cluster {out}")
    printer.result = {
        "cluster": str(cluster),
        "links": asdict(cluster.links),
        "device": None if device is None else asdict(device),
        "largest_error": largest,
        "samples": [{**asdict(s), "fitted": f} for s, f in zip(samples, fitted, strict=True)],
    }


def _device(printer: Printer, count: int) -> DeviceKind | None:
    """Return the speeds of a core with its share of the memory, while `count` processes run; a GPU's are known."""
    import torch

    if torch.cuda.is_available():
        return _gpu(printer, torch.cuda.get_device_name(0))
    from superscaler.cluster import LOCAL, DeviceKind
    from superscaler.launch.launch import call
    from superscaler.simulate.profile import Sample, errors, measure, speeds, widened

    found = call(measure, count, *_MODELS)[0]
    samples = [Sample.read(s) for s in found["samples"]]
    fitted = speeds(samples, found["floor"], found["fresh"])
    flops = {dtype: speed for dtype, (speed, _) in fitted.products.items()}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count
    error = errors(samples, DeviceKind(LOCAL, memory, flops, fitted))
    printer.show(
        f"{len(samples)} kernels; of all their seconds {error:.1%} are not explained",
        *(f"  products in {dtype}: {speed / 1e9:.0f} Gflop/s" for dtype, speed in flops.items()),
        f"  memory: {fitted.memory[1] / 1e9:.1f} GB/s; a kernel with its call: {fitted.floor * 1e6:.1f} us",
    )
    return DeviceKind(LOCAL, memory, flops, widened(fitted, error))


def _gpu(printer: Printer, name: str) -> DeviceKind | None:
    """Return the kind of a GPU of a preset: kernels are measured on CPUs alone."""
    from superscaler.cluster import LOCAL, PRESETS

    known = [kind for preset, kind in PRESETS.items() if preset in name.lower()]
    source = f"those of the preset {known[0].name}" if known else "unknown; add device.speeds for simulations"
    printer.show(f"the speeds of kernels on {name} are not measured, but {source}")
    return replace(known[0], name=LOCAL) if known else None


def _check_out(out: Path) -> None:
    if out.suffix not in _ENDINGS:
        raise InputError(f"--out {out} does not end in .yaml, by which --cluster knows a file; write {out.stem}.yaml.")
    if not out.parent.is_dir():
        raise InputError(f"--out {out} is in a folder that does not exist; make {out.parent} first.")
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise InputError(f"--out {out} cannot be written: it is {'a folder' if out.is_dir() else 'protected'}.")


def _count(spec: str | None) -> int:
    """Return the number of processes that measure."""
    import torch

    from superscaler.cluster import Cluster

    asked = None if spec is None else Cluster.parse(spec)
    if asked is not None and not asked.is_local:
        raise InputError(f"--cluster {spec} is not this machine, which alone can be measured; write local:N.")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 1:
        raise InputError("this machine has 1 GPU, but links join 2; set CUDA_VISIBLE_DEVICES= to measure its CPU.")
    count = len(asked.devices) if asked is not None else gpus or max(2, min(cores(), _USUAL))
    if not 2 <= count <= (gpus or _MOST):
        limit = f"this machine has {gpus} GPUs" if gpus else f"at most {_MOST} processes can be measured"
        raise InputError(f"--cluster {spec} has {count} devices, but links join 2 or more, and {limit}.")
    return count


def _write(out: Path, cluster: Cluster) -> None:
    import yaml

    head = "# Measured by superscaler doctor --measure: alpha in seconds, bandwidth in bytes per second.\n"
    tree = yaml.safe_load(str(cluster))
    with writing(f"--out {out}", "name a file in a folder that you may write to"):
        out.write_text(
            head + yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=120), encoding="utf-8"
        )


def _row(sample: Sample, fitted: float) -> Sequence[str]:
    seconds = (f"{value * 1e6:.1f}" for value in (sample.start, sample.seconds, fitted))
    name = {"device": "copy", "pair": "send"}.get(sample.link, sample.kind)
    return name, f"{sample.size:,}", *seconds, f"{fitted / sample.seconds - 1:+.0%}"


def _links(cluster: Cluster) -> list[str]:
    found = {name: getattr(cluster.links, name) for name in ("device", "pair", "intra")}
    return [f"  {n}: alpha {x.alpha * 1e6:.1f} us, bandwidth {x.bandwidth / 1e9:.2f} GB/s" for n, x in found.items()]
