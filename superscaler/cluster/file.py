"""A user's own cluster in YAML: `{name: lab, preset: v100, servers: 4, devices_per_server: 8}`.

`links` and `device` replace numbers of the preset: `links: {network: {bandwidth: 24e9}, nics: 8}`.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, StrictStr, ValidationError

from superscaler.cluster.links import LINKS, LOCAL, PRESETS, DeviceKind, Link, Links
from superscaler.errors import InputError, unknown
from superscaler.specs.yaml_file import parse


def _number(value: object) -> object:
    """Return a number for text like 5e-6, which YAML takes for a number only when it is written 5.0e-6."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


_Amount = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
_Seconds = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class LinkFile(_Checked):
    """`alpha` in seconds, `bandwidth` in bytes per second."""

    alpha: _Seconds | None = None
    bandwidth: _Amount | None = None


class LinksFile(_Checked):
    """Links by class. A `pair` is as `intra`, where only that is given; `nics` is null for one NIC per device."""

    device: LinkFile = LinkFile()
    pair: LinkFile = LinkFile()
    intra: LinkFile = LinkFile()
    network: LinkFile = LinkFile()
    host: LinkFile = LinkFile()
    nics: PositiveInt | None = None


class DeviceFile(_Checked):
    """`memory` in bytes, `flops` per second by dtype."""

    memory: Annotated[float, BeforeValidator(_number), Field(ge=1, allow_inf_nan=False)] | None = None
    flops: dict[StrictStr, _Amount] | None = None


class ClusterFile(_Checked):
    """The contents of the file. `preset`: the kind of its devices, or `local` if nothing is known about them."""

    name: StrictStr
    preset: StrictStr
    servers: PositiveInt
    devices_per_server: PositiveInt
    links: LinksFile = LinksFile()
    device: DeviceFile = DeviceFile()

    def joined(self, where: str) -> tuple[Links | None, DeviceKind | None]:
        """Return the preset's numbers with those of the file in their place, or None for an unknown preset."""
        if self.preset not in LINKS:
            return None, None
        return _links(LINKS[self.preset], self.links), self._device(where)

    def _device(self, where: str) -> DeviceKind | None:
        known, given = PRESETS.get(self.preset), self.device
        if given.memory is None and given.flops is None:
            return known
        if known is None and (given.memory is None or given.flops is None):
            missing = "memory" if given.memory is None else "flops"
            raise InputError(f"{where}: nothing is known about {LOCAL} devices; add device.{missing} too.")
        memory = known.memory if given.memory is None and known else int(given.memory or 0)
        return DeviceKind(self.preset, memory, {**(known.flops if known else {}), **(given.flops or {})})


def _links(known: Links, given: LinksFile) -> Links:
    changes: dict[str, Link] = {}
    for name in (f.name for f in fields(Links) if f.name != "nics"):
        link = getattr(given, name).model_dump(exclude_none=True)
        if name == "pair":
            link = {**given.intra.model_dump(exclude_none=True), **link}
        changes[name] = replace(getattr(known, name), **link)
    return Links(**changes, nics=given.nics if "nics" in given.model_fields_set else known.nics)


def read(text: str, where: str) -> ClusterFile:
    """Return the contents of a text. Raises InputError that names the first wrong key."""
    content = parse(text, where)
    keys = list(ClusterFile.model_fields)
    if not isinstance(content, dict):
        raise InputError(f"{where} must be a mapping with the keys {', '.join(keys)}.")
    try:
        return ClusterFile.model_validate(content)
    except ValidationError as error:
        # An unknown key comes first: it may be the misspelled missing one.
        problems = sorted(error.errors(), key=lambda problem: problem["type"] not in _STRANGE)
        raise InputError(f"{where}: {_message(problems[0])}") from None


def write(preset: str, links: Links, device: DeviceKind | None) -> str:
    """Return the keys `links` and `device` that make the preset's numbers these; nothing for those that are equal."""
    known = asdict(LINKS[preset])
    # `pair` is always written: a file without it gives it the numbers of `intra`.
    changed: dict[str, Any] = {k: v for k, v in asdict(links).items() if v != known[k] or k == "pair"}
    tree: dict[str, Any] = {"links": changed} if links != LINKS[preset] else {}
    if device is not None and device != PRESETS.get(preset):
        tree["device"] = {"memory": device.memory, "flops": dict(device.flops)}
    text: str = yaml.safe_dump(tree, default_flow_style=True, sort_keys=False, width=10**9)
    return text.strip().removeprefix("{").removesuffix("}")


_STRANGE = ("extra_forbidden", "invalid_key")
_MODELS: Mapping[str, type[_Checked]] = {
    "links": LinksFile, "device": DeviceFile,
    **{f"links.{name}": LinkFile for name in ("device", "pair", "intra", "network", "host")},
}  # fmt: skip


def _message(problem: Any) -> str:
    path = [str(key) for key in problem["loc"]]
    if problem["type"] in _STRANGE:
        model = _MODELS.get(".".join(path[:-1]), ClusterFile)
        return unknown("key", path[-1], model.model_fields) + (f" It is in {path[-2]}." if path[1:] else "")
    key = ".".join(path)
    if problem["type"] == "missing":
        return f"the key '{key}' is missing; add {key}: VALUE."
    return f"{key} is {problem['input']!r}, but {problem['msg'][0].lower()}{problem['msg'][1:]}."
