"""The report of a plan as one HTML file: words, pictures, and a timeline whose data are packed columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path

import numpy as np

from superscaler.report import kinds
from superscaler.report.page.answer import compared, verdict
from superscaler.report.page.data import packed
from superscaler.report.page.markup import Markup, table, tag
from superscaler.report.page.matrix import matrix
from superscaler.report.page.memory_curve import alive
from superscaler.report.page.model_table import model_table
from superscaler.report.page.numbers import numbers
from superscaler.report.picture import draw_paths
from superscaler.report.subject import Subject
from superscaler.simulate.storages import CATEGORIES
from superscaler.specs.file_errors import replace_own
from superscaler.specs.sizes import duration

# How a file begins that may be replaced.
HEAD = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="generator" content="superscaler">'
)
# The differences between predicted and measured times that are listed.
_LARGEST = 10


def save(subjects: Sequence[Subject], file: Path) -> None:
    """Write a report. Raises InputError for a file that cannot be written, or is no report."""
    replace_own(file, page(subjects), HEAD, "report")


def page(subjects: Sequence[Subject]) -> str:
    """Return the report of one plan, or of several beside each other."""
    title = " | ".join(subject.title for subject in subjects)
    parts = {"title": escape(title), "body": _body(title, subjects), "data": packed(subjects)}
    files = {"style": "page.css", "script": "page.js"}
    parts |= {name: _file(file).rstrip() for name, file in files.items()}
    parts["style"] = kinds.style() + parts["style"]
    text = _file("page.html")
    # Each from the left on, so that no text of a part is looked at.
    made = ""
    for name in ("title", "style", "body", "data", "script"):
        before, _, text = text.partition("{{" + name + "}}")
        made += before + parts[name]
    return made + text


def _file(name: str) -> str:
    return resources.files("superscaler.report.page").joinpath(name).read_text(encoding="utf-8")


def _body(title: str, subjects: Sequence[Subject]) -> str:
    head = tag("header", tag("h1", title), tag("button", "light / dark", id="theme", class_="push"))
    several = [tag("section", compared(subjects))] if len(subjects) > 1 else []
    sections = (_section(name, subjects, make) for name, make in _SECTIONS.items())
    return "\n".join(
        [
            head,
            tag("section", _pair(subjects, verdict)),
            *several,
            _timeline(subjects),
            *_differences(subjects),
            _memory(subjects),
            *sections,
        ]
    )


def _pair(subjects: Sequence[Subject], make: Callable[[Subject], Markup]) -> Markup:
    """Return the part of each plan by `make`, side by side; several plans have their titles above."""
    several = len(subjects) > 1
    parts = (tag("div", *([tag("h3", s.title)] if several else []), make(s)) for s in subjects)
    return tag("div", *parts, class_="pair" if several else None)


def _section(name: str, subjects: Sequence[Subject], make: Callable[[Subject], Markup]) -> Markup:
    return tag("section", tag("h2", name), _pair(subjects, make))


def _differences(subjects: Sequence[Subject]) -> list[Markup]:
    """Return the largest differences between predicted and measured steps."""
    some = [subject for subject in subjects if subject.differences]
    return [_section("Predicted and measured: the largest differences", some, _table_of)] if some else []


def _table_of(subject: Subject) -> Markup:
    def signed(seconds: float) -> str:
        return ("+" if seconds > 0 else "\u2212") + duration(abs(seconds))

    real, own = subject.timelines
    rows = (
        (
            "wait for " + d.title if d.is_wait else d.title,
            duration(d.predicted),
            duration(d.measured),
            signed(d.measured - d.predicted),
        )
        for d in subject.differences[:_LARGEST]
    )
    whole = "the step", duration(own.seconds), duration(real.seconds), signed(real.seconds - own.seconds)
    title = "Seconds of a step, in the mean over devices."
    return table(("", "predicted", "measured", "difference"), [whole, *rows], title=title)


def _exchanges(subject: Subject) -> Markup:
    if not subject.account["paths"]:
        return tag("p", "None: a single collective, or messages, do each exchange.", class_="quiet")
    return tag("figure", Markup(draw_paths(subject.account)), class_="paper")


def _certificate(subject: Subject) -> Markup:
    rows = ((_CHECKED[name], "holds", duration(seconds)) for name, seconds in subject.certificate.items())
    counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in subject.account["counts"].items())
    checked = table(("of every instruction of every device, before anything runs", "", "checked in"), rows, left=2)
    return tag("div", checked, tag("p", counts, class_="quiet"))


_CHECKED = {
    "conservation": "every read finds its elements with their whole value; every weight is updated once by all its "
    "gradients; replicas stay equal",
    "deadlock_free": "no device waits for ever, with sends that block",
}
_SECTIONS: Mapping[str, Callable[[Subject], Markup]] = {
    "Model: what is cut where": model_table,
    "Bytes between devices": lambda subject: matrix(subject.simulation.program),
    "Exchanges of several steps": _exchanges,
    "Certificate": _certificate,
    "The same in numbers": numbers,
}


def _memory(subjects: Sequence[Subject]) -> Markup:
    label = "memory of a device over the time of a step; the table below has its peak"
    keys = (
        tag("span", tag("i", style=f"background:var(--m{k})"), name, class_="memory")
        for k, name in enumerate(CATEGORIES)
    )
    charts = (
        part
        for number, subject in enumerate(subjects)
        for part in (
            tag("div", tag("label", f"{subject.title}, ", tag("select", id=f"device{number}")), class_="keys"),
            tag("div", tag("canvas", id=f"memory{number}", role="img", aria_label=label), class_="chart"),
        )
    )
    head = tag("h2", "Memory, under the same time axis"), tag("div", *keys, class_="keys")
    return tag("section", *head, *charts, _pair(subjects, alive), class_="wide")


_BUBBLES = (
    "A bubble is time in which a device waits for work of other devices: point at one to see which work, and on which "
    "device. The step gets shorter only where work on the critical path, which is underlined, gets shorter."
)


def _timeline(subjects: Sequence[Subject]) -> Markup:
    seen = {kinds.KINDS[k] for s in subjects for t in s.timelines for lane in t.lanes for k in np.unique(lane.kind)}
    keys = (tag("span", tag("i", style=f"background:var({kind.css})"), kind.words) for kind in sorted(seen))
    label = "timeline of a step; arrow keys choose events, w and s zoom, a and d pan, 0 shows all"
    canvas = tag("canvas", id="timeline", tabindex=0, role="application", aria_label=label)
    return tag(
        "section",
        tag("h2", "Timeline"),
        tag("div", *keys, tag("span", tag("i", class_="path"), "critical path"), class_="keys"),
        tag("p", _BUBBLES, class_="quiet"),
        tag("div", *_buttons(), class_="keys"),
        tag("div", canvas, class_="scroll"),
        tag("div", id="chosen", aria_live="polite"),
        tag("div", id="hover", role="tooltip"),
        class_="wide",
    )


def _buttons() -> list[Markup]:
    keys = {
        "\u2190 \u2192 \u2191 \u2193": "events",
        "w s": "zoom",
        "a d": "pan",
        "c": "critical path",
        "g": "what it waited for",
    }
    made = [tag("button", text, id=name) for name, text in (("all", "whole step"), ("in", "+"), ("out", "\u2212"))]
    hints = [tag("span", tag("kbd", key), f" {words}") for key, words in keys.items()]
    return [
        *made,
        *hints,
        tag("span", "drag pans, ctrl + wheel zooms, a click keeps an event, a double click goes near"),
    ]
