"""`superscaler doctor --measure`: times collectives and kernels on this machine, and writes a cluster that explains
them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superscaler.cli.printing import Printer, table
from superscaler.errors import InputError
from superscaler.specs.file_errors import writing
from superscaler.timing import cores

if TYPE_CHECKING:
    from superscaler.cluster import Cluster, DeviceKind, Links
    from superscaler.measure.fit import Sample
    from superscaler.measure.profile import Sample as KernelSample

_ENDINGS = (".yaml", ".yml")
# Processes without --cluster: more take long on a CPU and add little.
_USUAL = 4
_MOST = 64
# What else `measure` is given: how many sizes of models; how many sizes of collectives, and repetitions of each.
_MODELS: Sequence[str] = ()
_COLLECTIVES: Sequence[str] = ()
# The preset that stands for a GPU of none.
_LIKE = "a100"
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
    from superscaler.cluster import LOCAL, Cluster
    from superscaler.measure.fit import error, fit, predict, slowdown

    device, known = _device(printer, count)
    samples = _collectives(count) if count > 1 else []
    assert device.speeds is not None
    if device.speeds.units == 0:
        speeds = replace(device.speeds, slowdown=slowdown(samples), cores=cores())
        device = replace(device, speeds=speeds)
    cluster = Cluster.of("measured", LOCAL, 1, count, fit(samples, known), device)
    largest = max((error(cluster.links, s) for s in samples), default=0.0)
    fitted = [predict(cluster.links, s) for s in samples]
    if samples:
        shown = table(("collective", *_NUMBERS), map(_row, samples, fitted), _NUMBERS)
        printer.show(shown, f"largest error {largest:.0%}, {count} processes", *_links(cluster))
    if out is not None:
        _write(out, cluster)
        printer.show(f"wrote {out}; use it as --cluster {out}")
    printer.result = {
        "cluster": str(cluster),
        "links": asdict(cluster.links),
        "device": asdict(device),
        "largest_error": largest,
        "samples": [{**asdict(s), "fitted": f} for s, f in zip(samples, fitted, strict=True)],
    }


def _collectives(count: int) -> list[Sample]:
    """Return the measured collectives of `count` processes."""
    from superscaler.launch.launch import call
    from superscaler.measure.fit import Sample
    from superscaler.measure.links import measure as measure_links

    rows = call(measure_links, count, *_COLLECTIVES)[0]
    samples = [Sample(**{**found, "group": tuple(found["group"])}) for found in rows]
    return sorted(samples, key=lambda s: (s.link, s.kind, s.size))


def _device(printer: Printer, count: int) -> tuple[DeviceKind, Links]:
    """Return the speeds of a device while `count` processes run, and what is known about links that are not measured:
    of a GPU of a preset, its own.
    """
    import torch

    from superscaler.cluster import LOCAL, PRESETS, DeviceKind
    from superscaler.launch.launch import call
    from superscaler.measure import profile, profile_gpu

    if torch.cuda.is_available():
        return _gpu(printer, torch.cuda.get_device_name(0), call(profile_gpu.measure, count)[0])
    found = call(profile.measure, count, *_MODELS)[0]
    samples = [profile.Sample.read(s) for s in found["samples"]]
    fitted = profile.speeds(samples, found["floor"], found["fresh"])
    flops = {dtype: speed for dtype, (speed, _) in fitted.products.items()}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count
    kind = _shown(printer, samples, DeviceKind(LOCAL, memory, flops, fitted))
    return kind, PRESETS[LOCAL].links


def _gpu(printer: Printer, name: str, found: Mapping[str, Any]) -> tuple[DeviceKind, Links]:
    """Return the kind of a GPU of this name from what was measured on it, and its links: those of the preset of that
    name, with the measured copies to its host.
    """
    from superscaler.cluster import LOCAL, PRESETS, DeviceKind
    from superscaler.measure.profile import Sample
    from superscaler.measure.profile_gpu import speeds

    preset = next((preset for preset in PRESETS if preset in name.lower()), None)
    links, like = PRESETS[preset or _LIKE].links, PRESETS[preset or _LIKE].device
    assert like is not None
    assert like.speeds is not None
    samples = [Sample.read(s) for s in found["samples"]]
    fitted = speeds(samples, like.speeds, found["units"], found["floor"], found["issue"])
    # Of an unknown GPU the peak is the best that was measured.
    flops = like.flops if preset else {dtype: high for dtype, (_, high) in fitted.products.items()}
    kind = _shown(printer, samples, DeviceKind(LOCAL, found["memory"], flops, fitted))
    host = replace(links.host, bandwidth=found["host"])
    device = replace(links.device, bandwidth=fitted.memory[1] / 2)
    printer.show(
        f"  the host starts a kernel in {fitted.issue * 1e6:.1f} us; copies to it: {host.bandwidth / 1e9:.1f} GB/s",
        f"  what was not measured is that of the preset {preset}" if preset
        else f"  {name} is no preset; what was not measured is that of {_LIKE}",
    )  # fmt: skip
    return kind, replace(links, host=host, device=device)


def _shown(printer: Printer, samples: Sequence[KernelSample], kind: DeviceKind) -> DeviceKind:
    """Show what was fitted; return the kind with speeds that are wider by what is not explained."""
    from superscaler.measure.profile import errors, widened

    fitted = kind.speeds
    assert fitted is not None
    error = errors(samples, kind)
    printer.show(
        f"{len(samples)} kernels; of all their seconds {error:.1%} are not explained",
        *(f"  products in {dtype}: {low / 1e9:.0f} Gflop/s" for dtype, (low, _) in fitted.products.items()),
        f"  memory: {fitted.memory[1] / 1e9:.1f} GB/s; a kernel with its call: {fitted.floor * 1e6:.1f} us",
    )
    return replace(kind, speeds=widened(fitted, error))


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
    count = len(asked.devices) if asked is not None else gpus or max(2, min(cores(), _USUAL))
    if gpus and count > gpus:
        raise InputError(f"--cluster {spec} has {count} devices, but this machine has {gpus} GPUs; write local:{gpus}.")
    if not gpus and not 2 <= count <= _MOST:
        raise InputError(f"--cluster {spec} has {count} devices; write local:2 to local:{_MOST}: links join 2 or more.")
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
