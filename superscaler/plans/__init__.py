"""The library of plans: one sProgram a file, written only in the verbs. `resolve` finds a plan by its text."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping
from math import gcd, prod
from types import ModuleType
from typing import Any

from superscaler.errors import InputError, unknown
from superscaler.plans.lib.products import product
from superscaler.plans.lib.schedules import RULES
from superscaler.specs.options import for_function
from superscaler.specs.user_file import from_file
from superscaler.verbs import Cluster, Graph

SProgram = Callable[[Graph, Cluster], None]
# Plans that communicate in each layer, in the forward and in the backward.
_EACH_LAYER = ("tensor_parallel", "sequence_parallel", "ulysses", "dap", "tp")
_FACTOR = re.compile(r"(?P<name>[^:]+(?:\.py:\w+)?):(?P<size>\d+)(?:,(?P<keys>.*))?")


# The plan that a search finds (superscaler/planner).
AUTO = "auto"


def names() -> list[str]:
    """Return the names of the plans of the library."""
    return sorted({m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg}.union(RULES))


def home_of(name: str) -> ModuleType:
    """Return the file of a plan of the library."""
    return importlib.import_module(f"{__name__}.{'pipeline' if name in RULES else name}")


def keys_of(name: str) -> dict[str, Any]:
    """Return the keys of a plan of the library with their defaults."""
    home = home_of(name)
    _, _, *keys = inspect.signature(getattr(home, home.__name__.rpartition(".")[2])).parameters.values()
    return {key.name: key.default for key in keys if name not in RULES or key.name != "schedule"}


def resolve(spec: str, written: str = "") -> SProgram:
    """Return the sProgram named `NAME[:key=value,...]` or `path/to/file.py:function[:key=value,...]`, or a product of
    plans along one axis, each with its size unless the others determine it: `zero:2,stage=3 x tensor_parallel`.

    Raises InputError for an unknown plan, function or key, a value of the wrong type, or a file that cannot be run. An
    error of an sProgram in a file becomes an InputError that names its line. `written`: the text that errors show.
    """
    terms = re.split(r"\s+x\s+", spec.strip())
    if len(terms) > 1 or _FACTOR.fullmatch(spec):
        return _product(spec, terms)
    name, _, keys = spec.partition(":")
    if name == AUTO:
        raise InputError(
            f"'{written or spec}': auto is the plan that a search finds, and stands alone, as --plan auto; give "
            "constraints to superscaler search, and take the plan that it prints."
        )
    if name.endswith(".py"):
        return from_file(spec, "plan", ("graph", "cluster"), "is_sprogram")
    if name not in names():
        text = unknown("plan", name, names())
        raise InputError(f"{text} superscaler plans lists all. Or give a file: path/to/file.py:function.")
    if strange := [key for key in keys.split(",") if key.partition(":")[0].strip() in names()]:
        raise InputError(f"'{written or spec}': {strange[0]} is a plan, not a key; write ' x ' between two plans.")
    module, given = ("pipeline", {"schedule": name}) if name in RULES else (name, {})
    function = getattr(importlib.import_module(f"{__name__}.{module}"), module)
    found = functools.partial(function, **(given | for_function(written or spec, keys, function, skip=2)))
    vars(found).update(spec=written or spec)
    return found


def check(spec: str, sizes: Mapping[str, int], cluster: Cluster) -> None:
    """Raise InputError for options of a plan that no model of these sizes has on a cluster; it needs no model. Of a
    product the devices are counted; of other plans only those of the library with one of `sizes.CHECKS` are checked.
    """
    from superscaler.plans.lib.sizes import CHECKS

    plan = resolve(spec)
    if sizes_of_axes := getattr(plan, "sizes", None):
        cluster.mesh(**sizes_of_axes)
    function = getattr(plan, "func", plan)
    if function.__module__.startswith(__name__) and function.__name__ in CHECKS:
        CHECKS[function.__name__](sizes, cluster, **getattr(plan, "keywords", {}))


def over_servers(spec: str, cluster: Cluster) -> str:
    """Return a line about a factor that communicates in each layer over several servers, with a spec that keeps it
    inside of one; nothing for other plans.

    >>> over_servers("tensor_parallel:2 x data_parallel", Cluster.parse("a100:2x8")).partition("; ")[2]
    'the first factor is outermost: data_parallel x tensor_parallel:2 stays inside a server'
    """
    terms, each, count = re.split(r"\s+x\s+", spec.strip()), cluster.devices_per_server, len(cluster.devices)
    names = [re.split("[:,]", term)[0] for term in terms]
    sizes = [int(factor["size"]) if (factor := _FACTOR.fullmatch(term)) else 0 for term in terms]
    if names == ["hybrid"]:
        tp = re.search(r"\btp=([\d+]+)", spec)
        names, sizes = ["tp"], [max(map(int, re.findall(r"\d+", tp[1]))) if tp else 1]
    if sizes.count(0) > 1:
        # As in a product.
        sizes = [size or int("recompute" in name) for name, size in zip(names, sizes, strict=True)]
    left = count // prod(filter(None, sizes))
    for at, (name, size) in enumerate(zip(names, sizes, strict=True)):
        n, step = size or left, prod(size or left for size in sizes[at + 1 :])
        if cluster.servers == 1 or name not in _EACH_LAYER or n == 1 or each % (n * step) == 0:
            continue
        speeds = f"{cluster.links.network.bandwidth / 1e9:g} GB/s a NIC, not {cluster.links.intra.bandwidth / 1e9:g}"
        line = f"{name} of {n} communicates in each layer over servers, as devices 0 and {(n - 1) * step} ({speeds}); "
        if each % n or len(terms) == 1:
            few = gcd(n, each)
            return line + f"{name} of {few} stays inside, beside {n // few} times as many of another factor"
        inner = " x ".join([*terms[:at], *terms[at + 1 :], terms[at]])
        return line + f"the first factor is outermost: {inner} stays inside a server"
    return ""


def _product(spec: str, terms: list[str]) -> SProgram:
    found: dict[str, tuple[int, SProgram]] = {}
    for term in terms:
        factor = _FACTOR.fullmatch(term)
        # A file whose function needs no name has an empty one before its keys.
        between = "::" if factor and factor["name"].endswith(".py") else ":"
        plan = resolve(between.join(filter(None, factor.group("name", "keys"))) if factor else term, term)
        name = getattr(plan, "func", plan).__name__
        if name in found and name == "pipeline":
            raise InputError(
                f"'{spec}': two pipelines, but a model is cut into stages once; choose one, on the devices of both."
            )
        if name in found:
            raise InputError(f"'{spec}' has {name} twice; choose one, of the product of the two numbers.")
        found[name] = int(factor["size"]) if factor else -1, plan
    return product(spec, found)
