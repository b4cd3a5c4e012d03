"""The answer of a report: whether a plan fits, how long its step is, its limit, and the remedy that would help most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from superscaler.report.kinds import Kind
from superscaler.report.page.markup import Markup, table, tag
from superscaler.report.subject import Subject
from superscaler.simulate.predict import Simulation
from superscaler.simulate.prediction import COLUMNS, Prediction, device_rows, devices_text, peak_share
from superscaler.specs.options import HALVES
from superscaler.specs.sizes import duration, number, size

# How many times as much work as on average makes a device the one that the others wait for.
_UNEVEN = 1.2
# The share of a step that a lower precision must save in products alone to be named.
_WORTH = 0.05
# A step that is so many times its bound is not compared with it.
_MOST_TIMES = 100


class Part(NamedTuple):
    """A part of a step in the mean over all devices: its name, the kind with its colour, its seconds, its remedy."""

    name: str
    kind: Kind
    seconds: float
    help: str


def parts(p: Prediction) -> list[Part]:
    """Return the parts of a step; their seconds sum up to the step's."""
    bound = min(p.bound, p.mean("compute"))
    return [
        Part("the model's own operations, at full rate", Kind.BACKWARD, bound, "more devices, or a lower precision"),
        Part(
            "other and slower kernels", Kind.FORWARD, p.mean("compute") - bound,
            "larger parts (fewer microbatches, fewer cuts), less recomputation, fused kernels",
        ),
        Part("optimizer", Kind.UPDATE, p.mean("optimizer"), "updates cut over the devices (zero:stage=1)"),
        Part("start of communication", Kind.LAUNCH, p.mean("launch"), "fewer, larger messages"),
        Part(
            "waits for data on their way", Kind.EXPOSED, p.mean("communication"),
            "fewer devices that share a layer, collectives inside of servers, or sends beside work",
        ),
        Part("waits for copies", Kind.COPYING, p.mean("copies"), "fewer values that rest on the host"),
        Part("waits for other devices", Kind.BUBBLE, p.mean("bubble"), _even(p)),
    ]  # fmt: skip


def _even(p: Prediction) -> str:
    """Return the remedy for waits for other devices: even work, else less waiting for it."""
    busiest = max(p.devices, key=lambda d: d.compute)
    if busiest.compute > _UNEVEN * p.mean("compute"):
        where = devices_text(busiest.devices, p.world)
        mean = duration(p.mean("compute"))
        return f"even work: that of {where} takes {duration(busiest.compute)}, of a device {mean} on average"
    return "more microbatches, or a schedule with less idle time (interleaved, zb_h1)"


def verdict(subject: Subject) -> Markup:
    """Return the answer for a plan, in words and numbers."""
    p = subject.simulation.prediction
    low, high = duration(p.low), duration(p.high)
    facts = [f"{low} to {high} on fast and slow devices of the kind"] if low != high else []
    facts += [share] if (share := peak_share(p)) else []
    facts += [
        p.speed,
        p.precision,
        f"{p.world} devices of {subject.simulation.cluster.name}",
    ]
    return tag(
        "div",
        tag("p", *_fit(p), f" A step takes {duration(p.step_seconds)}.", class_="verdict"),
        tag("p", "; ".join(facts), class_="quiet"),
        _bar(parts(p), p.step_seconds),
        *(tag("p", line) for line in _limits(subject.simulation)),
        *(tag("p", note, class_="quiet") for note in subject.notes),
    )


def _fit(p: Prediction) -> Sequence[object]:
    full, where = p.fullest, devices_text(p.fullest.devices, p.world)
    if not p.capacity:
        return [f"Needs {size(full.peak_bytes)} on {where}."]
    text = f"{size(full.peak_bytes)} of {size(p.capacity)} on {where}."
    return ["Fits: " + text] if p.fits else [tag("span", "Does not fit: ", class_="bad"), text]


def _bar(every: Sequence[Part], whole: float) -> Markup:
    shown = [part for part in every if part.seconds > 0.002 * whole]
    bar = (
        tag("span", style=f"flex:{part.seconds / whole:.5f};background:var({part.kind.css})", title=_said(part, whole))
        for part in shown
    )
    keys = (tag("span", tag("i", style=f"background:var({part.kind.css})"), _said(part, whole)) for part in shown)
    picture = tag("div", *bar, class_="parts", role="img", aria_label="parts of a step")
    return tag("div", picture, tag("div", *keys, class_="keys"))


def _said(part: Part, whole: float) -> str:
    return f"{part.name} {duration(part.seconds)} ({part.seconds / whole:.0%})"


def _limits(simulation: Simulation) -> list[Markup]:
    """Return the limit of a step and the remedies that would help most, each as a line."""
    p = simulation.prediction
    losses = sorted(parts(p)[1:], key=lambda part: -part.seconds)
    most = losses[0]
    # Of a model so small that its products take no time, the ratio says nothing.
    is_near = p.step_seconds < _MOST_TIMES * p.bound
    allowed = f"; the step is {number(p.step_seconds / p.bound)} times what this hardware allows" if is_near else ""
    share = _said(most, p.step_seconds).removeprefix(most.name).lstrip()
    lines = [_line("What limits it: ", f"{most.name}, {share} of the step in the mean over devices{allowed}.")]
    if p.capacity and not p.fits:
        name, count = max(p.fullest.memory.items(), key=lambda pair: pair[1])
        over, remedy = size(p.fullest.peak_bytes - p.capacity), _MEMORY.get(name, "more devices")
        lines.append(
            _line(_HELPS, f"memory first: {over} are too many, {size(count)} of the peak are {name}; {remedy}.")
        )
    without = duration(p.step_seconds - most.seconds)
    help = f"{most.help}; without these {duration(most.seconds)} a step would take {without}."
    return [*lines, *_of_precision(simulation), _line(_HELPS, help)]


def _of_precision(simulation: Simulation) -> list[Markup]:
    """Return a line where products in 16 bits would make a step clearly shorter, as they are in more of them here."""
    p, cluster = simulation.prediction, simulation.cluster
    kind, half = cluster.device_kind, HALVES.get(cluster.precision)
    if kind is None or half is None or not p.peak_flops or p.peak_flops >= kind.flops[half]:
        return []
    saved = p.bound * (1 - p.peak_flops / kind.flops[half])
    if saved < _WORTH * p.step_seconds:
        return []
    rates = f"{p.peak_flops / 1e12:.4g} TFLOPS at the peak, those in {half} {kind.flops[half] / 1e12:.4g}"
    text = f"a lower precision (--precision {cluster.precision}): the products of this plan have {rates}"
    more = f"that alone saves {duration(saved)}, and other kernels and sends move half of the bytes"
    return [_line(_HELPS, f"{text}; {more}.")]


_MEMORY: Mapping[str, str] = {
    "activations": "recompute them (x recompute), or take more microbatches",
    "optimizer": "cut its state over the devices (zero:stage=1)",
    "gradients": "cut them over the devices (zero:stage=2)",
    "weights": "cut them over the devices (zero:stage=3, or tensor_parallel)",
    "gathered": "gather fewer weights at once",
}


_HELPS = "What would help most: "


def _line(title: str, text: str) -> Markup:
    return tag("span", tag("b", title), text)


def compared(subjects: Sequence[Subject]) -> Markup:
    """Return plans in a table, side by side."""
    predictions = [s.simulation.prediction for s in subjects]
    rows = [
        ("step", *(duration(p.step_seconds) for p in predictions)),
        ("largest peak", *(size(p.fullest.peak_bytes) for p in predictions)),
        ("bytes on links", *(size(sum(p.links.values())) for p in predictions)),
        *(
            (some[0].name, *(duration(part.seconds) for part in some))
            for some in zip(*map(parts, predictions), strict=True)
        ),
    ]
    return table(["", *(s.title for s in subjects)], rows)


def times(subject: Subject) -> Markup:
    """Return the seconds and the peak of each distinct program as a table."""
    rows = device_rows(subject.simulation.prediction)
    return table(
        ["devices", *COLUMNS],
        rows,
        title="Seconds of a step by where they go, in the mean over devices of one program.",
    )
