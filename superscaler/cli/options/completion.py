"""Completion by the shell of models, plans and clusters: their names, and after a colon their keys."""

from __future__ import annotations

import re
from collections.abc import Iterable

from superscaler.specs.options import OPTIMIZERS


def completed(incomplete: str, names: Iterable[str]) -> list[str]:
    """Return the names that begin with a text."""
    return [name for name in names if name.startswith(incomplete)]


def optimizers(incomplete: str) -> list[str]:
    """Return the optimizers that begin with a text; none: inference."""
    return completed(incomplete, (*OPTIMIZERS, "none"))


def models(incomplete: str) -> list[str]:
    """Return specs of the library's models that begin with a text.

    >>> models("gpt2:size=ti"), models("gpt2:batch=4,lay")
    (['gpt2:size=tiny'], ['gpt2:batch=4,layers='])
    """
    from superscaler.models.families import FAMILIES

    name, colon, keys = incomplete.partition(":")
    if not colon or name not in FAMILIES:
        return completed(incomplete, sorted(FAMILIES))
    sizes = FAMILIES[name].sizes
    every = [f"size={size}" for size in sizes if size] + [f"{key}=" for key in sizes[FAMILIES[name].default]]
    return _with_keys(f"{name}:", keys, every)


def plans(incomplete: str) -> list[str]:
    """Return plans of the library that begin with a text, of a product the last one.

    >>> plans("zero:2,stage=3 x sequence_p"), plans("hybrid:dp=2,t")
    (['zero:2,stage=3 x sequence_parallel'], ['hybrid:dp=2,tp='])
    """
    from superscaler.plans import keys_of, names

    found = re.fullmatch(r"(?P<before>.*\sx\s+)?(?P<last>.*)", incomplete)
    assert found is not None
    before, (name, colon, keys) = found["before"] or "", found["last"].partition(":")
    if not colon or name not in names():
        return [before + plan for plan in completed(found["last"], names())]
    return _with_keys(f"{before}{name}:", keys, [f"{key}=" for key in keys_of(name)])


def clusters(incomplete: str) -> list[str]:
    """Return the names of clusters that begin with a text.

    >>> clusters("a1"), clusters("h")
    (['a100:'], ['h100:', 'h200:'])
    """
    from superscaler.cluster.known import PRESETS

    return completed(incomplete, [f"{name}:" for name in PRESETS])


def _with_keys(start: str, keys: str, every: Iterable[str]) -> list[str]:
    """Return a spec with one more key, for each that begins with the end of a text and is not given yet."""
    given, _, last = keys.rpartition(",")
    there = {pair.partition("=")[0] for pair in given.split(",")}
    before = f"{start}{given}," if given else start
    return [before + key for key in every if key.startswith(last) and key.partition("=")[0] not in there]
