"""Figures of the evaluation: bars in groups, as SVG for the page and PNG for slides.

matplotlib (the `paper` extra) draws them: one drawing is written as both, and a PNG needs something that sets text.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from points import ROOT

# None: no figure is drawn.
FOLDER: Path | None = ROOT / "docs/evaluation"
# Paul Tol's bright scheme, for readers who do not see all colours.
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377", "#66ccee")
_STYLE = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "superscaler",
}
# place -> label -> height; None is a cross.
Groups = Mapping[str, Mapping[str, float | None]]


def bars(name: str, title: str, groups: Groups, unit: str, line: tuple[float, str] | None = None) -> str:
    """Write a figure with a group of bars for each place, and return the Markdown of it.

    `line`: a number to compare with, and what it is.
    """
    if FOLDER and any(groups.values()):
        try:
            import matplotlib.pyplot as plt
        except ImportError:
            sys.exit("Figures need matplotlib: pip install -e '.[paper]'")
        FOLDER.mkdir(parents=True, exist_ok=True)
        with plt.rc_context(_STYLE):
            figure, axes = plt.subplots(figsize=(7, 2.9), layout="constrained")
            axes.set_title(title, loc="left", fontsize=9)
            axes.set_ylabel(unit)
            _draw(axes, groups, line)
            # Without a date and a version the same numbers make the same file.
            figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None, "Creator": None})
            figure.savefig(FOLDER / f"{name}.png", dpi=120, metadata={"Software": None})
            plt.close(figure)
    return f"![{title}](evaluation/{name}.svg)\n"


def _draw(axes: Any, groups: Groups, line: tuple[float, str] | None) -> None:
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))
    wide = 0.8 / len(labels)
    for k, label in enumerate(labels):
        found = {n: group[label] for n, group in enumerate(groups.values()) if label in group}
        places = [n + (k + 0.5) * wide - 0.4 for n in found]
        drawn = axes.bar(places, [high or 0 for high in found.values()], 0.9 * wide, color=_COLOURS[k], label=label)
        axes.bar_label(drawn, [_said(high) for high in found.values()], fontsize=6)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.margins(y=0.2)
    if line:
        axes.axhline(line[0], color="#555555", linestyle="--", linewidth=0.8, label=line[1])
    axes.legend(ncols=len(labels) + 1, loc="upper left")


def _said(high: float | None) -> str:
    return "x" if high is None else f"{high:.0f}" if high >= 100 else f"{high:.2g}"
