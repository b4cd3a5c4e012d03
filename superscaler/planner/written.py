"""The plan of a search as a file of Python, with the reason by each decision."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from superscaler.errors import printable
from superscaler.planner.reasons import lines, reasons
from superscaler.planner.search import Answer
from superscaler.planner.space import DECISIONS, LAYOUTS, SCHEDULES
from superscaler.simulate.prediction import devices_text
from superscaler.specs.sizes import size

# Keys of plans, and plans in a product, -> the decisions that they say.
_OF_KEYS = {
    "microbatches": ("batch", "rows"), "chunks": ("schedule",), "sequence": ("layout",), "stage": ("zero",),
    "what": ("recompute",),
}  # fmt: skip
_OF_PLANS = {
    **dict.fromkeys(SCHEDULES.values(), ("pp", "schedule")),
    **dict.fromkeys(LAYOUTS.values(), ("tp", "layout")),
    "hybrid": ("schedule",), "data_parallel": ("dp",), "zero": ("dp", "zero"), "fsdp": ("dp", "zero"),
    "recompute": ("recompute",), "co_shard": ("recompute",), "chunked_loss": ("loss",), "swap": ("swap",),
}  # fmt: skip
# The pieces of a term: a plan with its size, and its keys.
_PIECE = re.compile(r"[^:,=]+:\d*(?:,|$)|[^:,]+:|[^,]+,?")
_ALONE = "other values are excluded, or could not be better"
_FILE = '''"""{title}

{facts}

    {command}
"""

from superscaler import Cluster, Graph, sprogram
from superscaler.plans import resolve

# By each decision: how much longer the steps of the best plans with another value are.
PLAN = (
{pieces}
)


@sprogram
def plan(graph: Graph, cluster: Cluster) -> None:
    """Cut, place and order the step as PLAN says."""
    resolve(PLAN)(graph, cluster)
'''


def text_of(answer: Answer, title: str, facts: Mapping[str, str], command: str) -> str:
    """Return the best plan of an answer as a file that `--plan` takes. `facts`: of the search, after the figures."""
    p = answer.best.prediction
    where = devices_text(p.fullest.devices, p.world)
    memory = f"{size(p.fullest.peak_bytes)} on {where}" + (f", of {size(p.capacity)}" if p.capacity else "")
    known = {"batch": str(answer.best.choice.batch), "memory": memory, **{k: v for k, v in facts.items() if v}}
    rows = [*lines(answer), *(f"{name}: {text}" for name, text in known.items())]
    return _FILE.format(
        title=_quoted(title), facts="\n".join(map(_quoted, rows)), command=_quoted(command),
        pieces="\n".join(_pieces(answer)),
    )  # fmt: skip


def _quoted(text: str) -> str:
    """Return a text as it is inside of a docstring."""
    return printable(text).replace("\\", "\\\\").replace('"""', '\\"' * 3)


def _pieces(answer: Answer) -> Iterator[str]:
    """Yield the lines of the plan's text: its pieces, each behind the reasons of what it says."""
    known, choice, found = reasons(answer), answer.best.choice, list[str]()
    alone = {name: f"{choice.said(name)}: {_ALONE}" for name in DECISIONS if name != "batch"}
    texts = {**alone, **known}
    left = {name: f"    # {name} {text}" for name, text in texts.items()}
    terms = answer.best.spec.split(" x ")
    for number, term in enumerate(terms):
        pieces = _PIECE.findall(term)
        for piece in pieces:
            found += [left.pop(name) for name in _decisions(piece) if name in left]
            found += ["    # blocks of each stage: the slowest one is fastest so"] * piece.startswith("blocks=")
            found += ["    # the works of each device in their order, those in parentheses again and again"] * (
                piece.startswith("schedule=") and "F" in piece
            )
            is_last = piece is pieces[-1] and number < len(terms) - 1
            found.append(f'    "{piece}{" x " if is_last else ""}"')
    # What the text does not say comes first.
    yield from (line for name, line in left.items() if name in known)
    yield from found


def _decisions(piece: str) -> tuple[str, ...]:
    """Return the decisions that a piece of a plan's text says."""
    name = re.split("[:=,]", piece)[0]
    return (name,) if name in DECISIONS and "=" in piece else (_OF_KEYS if "=" in piece else _OF_PLANS).get(name, ())
