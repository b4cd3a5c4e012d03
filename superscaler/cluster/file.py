"""A cluster in YAML: `{name: lab, preset: v100, servers: 4, devices_per_server: 8}`.

`links` and `device` replace numbers of the preset: `links: {network: {bandwidth: 24e9}, nics: 8}`. A preset is such a
file without servers; it may start from another preset, or has all numbers itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    StrictStr,
    ValidationError,
)

from superscaler.cluster.devices import Attention, DeviceKind, Preset, Speeds, classes
from superscaler.cluster.links import Link, Links
from superscaler.cluster.seconds import COLLECTIVES, MESSAGES
from superscaler.errors import InputError, unknown
from superscaler.specs.yaml_file import parse


def _number(value: object) -> object:
    """Return a number for text like 5e-6: YAML reads it as a number only in the form 5.0e-6."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


_Amount = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
_Seconds = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]


def _two(value: object) -> object:
    """Return the list as a pair, or one number twice."""
    return tuple(value) if isinstance(value, list) else (value, value)


_Pair = Annotated[tuple[_Amount, _Amount], BeforeValidator(_two)]


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class LinkFile(_Checked):
    """A link: `alpha` in seconds, `bandwidth` in bytes per second."""

    alpha: _Seconds | None = None
    bandwidth: _Amount | None = None


class LineFile(_Checked):
    """A link with both numbers given."""

    alpha: _Seconds
    bandwidth: _Amount


class LinksFile(_Checked):
    """Links by class. `pair` has the numbers of `intra` if only `intra` is given; `nics` is null for one NIC per
    device; `steps`, `curves` and `starts` are those of `Links`.
    """

    device: LinkFile = LinkFile()
    pair: LinkFile = LinkFile()
    intra: LinkFile = LinkFile()
    network: LinkFile = LinkFile()
    host: LinkFile = LinkFile()
    nics: PositiveInt | None = None
    steps: dict[PositiveInt, _Amount] = {}
    curves: dict[StrictStr, dict[PositiveInt, _Amount]] = {}
    starts: dict[StrictStr, LineFile] = {}


class AttentionFile(_Checked):
    """The fields of `Attention`."""

    rates: dict[PositiveInt, _Pair] = Field(min_length=1)
    ramp: NonNegativeInt = 0
    causal: _Amount = 1.0
    tile: PositiveInt = 1


class SpeedsFile(_Checked):
    """The fields of `Speeds`. Tables are joined with those of the preset. `shares`: of the bandwidth of memory, by
    operator or class of operators, with estimates for classes left out (see `classes`); they, and `attentions`, replace
    the preset's.
    """

    units: NonNegativeInt | None = None
    products: Annotated[dict[StrictStr, _Pair], Field(min_length=1)] | None = None
    boost: dict[StrictStr, _Amount] | None = None
    unaligned: dict[StrictStr, _Amount] | None = None
    memory: _Pair | None = None
    attention: dict[StrictStr, AttentionFile] | None = None
    attentions: dict[StrictStr, dict[StrictStr, AttentionFile]] | None = None
    shares: dict[StrictStr, _Amount] | None = None
    operators: dict[StrictStr, LineFile] | None = None
    floor: _Seconds | None = None
    issue: _Seconds | None = None
    cores: NonNegativeInt | None = None
    fresh: _Seconds | None = None
    slowdown: Annotated[float, BeforeValidator(_number), Field(ge=1, allow_inf_nan=False)] | None = None

    def joined(self, known: Speeds | None, kind: str, where: str) -> Speeds:
        """Return the known speeds of a kind of device with those of the file in their place."""
        given = ((name, getattr(self, name)) for name in self.model_fields_set)
        found: dict[str, Any] = {name: value for name, value in given if value is not None}
        if known is None:
            _check_known(("products", "memory"), found, "device.speeds.", kind, where)
            known = Speeds(0, {}, found["memory"])
        shares = found.pop("shares", None)
        if shares is not None:
            known = replace(known, operators=classes(found.get("memory", known.memory), shares))
        for name, make in (("attention", Attention), ("operators", Link)):
            found[name] = {key: make(**one.model_dump()) for key, one in found.get(name, {}).items()}
        if others := found.get("attentions"):
            found["attentions"] = {
                name: {key: Attention(**one.model_dump()) for key, one in table.items()}
                for name, table in others.items()
            }
        for name in ("products", "boost", "unaligned", "attention", "operators"):
            found[name] = {**getattr(known, name), **found.get(name, {})}
        return replace(known, **found)


class DeviceFile(_Checked):
    """A device: `memory` in bytes, `flops` per second by dtype, `speeds` of kernels."""

    memory: Annotated[float, BeforeValidator(_number), Field(ge=1, allow_inf_nan=False)] | None = None
    flops: dict[StrictStr, _Amount] | None = None
    speeds: SpeedsFile | None = None


class ClusterFile(_Checked):
    """The contents of the file. `preset`: the kind of its devices, or `local` for unknown ones. `name`: or that."""

    name: StrictStr | None = None
    preset: StrictStr
    servers: PositiveInt
    devices_per_server: PositiveInt
    links: LinksFile = LinksFile()
    device: DeviceFile = DeviceFile()


class PresetFile(_Checked):
    """The contents of the file of a preset. `preset`: where the numbers come from that it leaves out."""

    preset: StrictStr | None = None
    links: LinksFile = LinksFile()
    device: DeviceFile = DeviceFile()


T = TypeVar("T", ClusterFile, PresetFile)


def joined(found: ClusterFile | PresetFile, known: Preset | None, kind: str, where: str) -> Preset:
    """Return the numbers of a file, those of its preset where it has none, for a kind of device. Raises InputError if
    neither has them.
    """
    links, device = (known.links, known.device) if known else (None, None)
    return Preset(_links(found.links, links, kind, where), _device(found.device, device, kind, where))


def _check_known(names: Sequence[str], found: Mapping[str, Any], above: str, kind: str, where: str) -> None:
    for name in names:
        if found.get(name) is None:
            raise InputError(f"{where}: nothing is known about {kind} devices; add {above}{name} too.")


def _device(given: DeviceFile, known: DeviceKind | None, kind: str, where: str) -> DeviceKind | None:
    if not given.model_fields_set:
        return known and replace(known, name=kind)
    if known is None:
        _check_known(("memory", "flops"), vars(given), "device.", kind, where)
    memory = known.memory if given.memory is None and known else int(given.memory or 0)
    speeds = known.speeds if known else None
    if given.speeds is not None:
        speeds = given.speeds.joined(speeds, kind, where)
    return DeviceKind(kind, memory, {**(known.flops if known else {}), **(given.flops or {})}, speeds)


def _links(given: LinksFile, known: Links | None, kind: str, where: str) -> Links:
    links: dict[str, Link] = {}
    for name in _CLASSES:
        link = getattr(given, name).model_dump(exclude_none=True)
        if name == "pair":
            link = {**given.intra.model_dump(exclude_none=True), **link}
        if known is None:
            _check_known(("alpha", "bandwidth"), link, f"links.{name}.", kind, where)
        links[name] = replace(getattr(known, name), **link) if known else Link(**link)
    if known is None and "nics" not in given.model_fields_set:
        raise InputError(f"{where}: nothing is known about {kind} devices; add links.nics too, null for one a device.")
    nics = given.nics if "nics" in given.model_fields_set or known is None else known.nics
    starts = {name: Link(**one.model_dump()) for name, one in given.starts.items()}
    more, begun = (known.curves, known.starts) if known else ({}, {})
    steps = given.steps if "steps" in given.model_fields_set or known is None else known.steps
    return Links(**links, nics=nics, steps=steps, curves={**more, **given.curves}, starts={**begun, **starts})


def read_preset(text: str, where: str, name: str, presets: Mapping[str, Preset]) -> Preset:
    """Return the numbers of a preset's text. Raises InputError for a wrong key, or a missing number."""
    found = read(text, where, PresetFile)
    if found.preset is not None and found.preset not in presets:
        raise InputError(f"{where}: {unknown('preset', found.preset, presets)}")
    return joined(found, presets[found.preset] if found.preset else None, name, where)


def read(text: str, where: str, form: type[T]) -> T:
    """Return the contents of a text, a cluster's or a preset's. Raises InputError with the first wrong key."""
    content = parse(text, where)
    keys = list(form.model_fields)
    if not isinstance(content, dict):
        raise InputError(f"{where} must be a mapping with the keys {', '.join(keys)}.")
    try:
        found = form.model_validate(content)
    except ValidationError as error:
        # An unknown key comes first: it may be the misspelled missing one.
        problems = sorted(error.errors(), key=lambda problem: problem["type"] not in _STRANGE)
        raise InputError(f"{where}: {_message(problems[0], form)}") from None
    _check_names(found, where)
    return found


def _check_names(found: ClusterFile | PresetFile, where: str) -> None:
    """Raise InputError for a name that nothing reads in a table of numbers by dtype, pass or kind of collective."""
    speeds, links = found.device.speeds or SpeedsFile(), found.links
    passes = [f"{name}{dtype}" for name in ("forward", "backward") for dtype in ("", *(f" {d}" for d in _DTYPES))]
    for table, names, known in (
        ("device.flops", found.device.flops, _DTYPES),
        ("device.speeds.products", speeds.products, _DTYPES),
        ("device.speeds.boost", speeds.boost, _DTYPES),
        ("device.speeds.unaligned", speeds.unaligned, _DTYPES),
        ("device.speeds.attention", speeds.attention, passes),
        *((f"device.speeds.attentions.{name}", table, passes) for name, table in (speeds.attentions or {}).items()),
        ("links.curves", links.curves, _KINDS),
        ("links.starts", links.starts, _KINDS),
    ):
        if strange := [name for name in names or () if name not in known]:
            raise InputError(f"{where}: {unknown('key', strange[0], known)} It is in {table}.")


def write(preset: Preset, links: Links, device: DeviceKind | None) -> str:
    """Return the keys `links` and `device` of a file: the numbers that differ from the preset's."""
    known = asdict(preset.links)
    # `pair` is always written: a file without it gives it the numbers of `intra`.
    changed: dict[str, Any] = {k: v for k, v in asdict(links).items() if v != known[k] or k == "pair"}
    tree: dict[str, Any] = {"links": changed} if links != preset.links else {}
    if device is not None and device != preset.device:
        tree["device"] = {"memory": device.memory, "flops": dict(device.flops)}
        own = preset.device.speeds if preset.device else None
        if device.speeds is not None and device.speeds != own:
            tree["device"]["speeds"] = _plain(asdict(device.speeds))
    text: str = yaml.safe_dump(tree, default_flow_style=True, sort_keys=False, width=10**9)
    return text.strip().removeprefix("{").removesuffix("}")


def _plain(value: Any) -> Any:
    """Return a tree of dicts, with lists for tuples."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [*map(_plain, value)] if isinstance(value, tuple) else value


# Links of a class, without its NICs and what was measured beside.
_CLASSES = tuple(field.name for field in fields(Links) if field.type is Link)
# The dtypes that products and attention may have, and the kinds of communication.
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_KINDS = (*COLLECTIVES, *MESSAGES)
_STRANGE = ("extra_forbidden", "invalid_key")
_MODELS: Mapping[str, type[_Checked]] = {
    "links": LinksFile, "device": DeviceFile, "device.speeds": SpeedsFile,
    **{f"links.{name}": LinkFile for name in _CLASSES},
}  # fmt: skip
# Models of the rows of a table.
_ROWS: Mapping[str, type[_Checked]] = {
    "device.speeds.attention": AttentionFile, "device.speeds.operators": LineFile, "links.starts": LineFile
}  # fmt: skip


def _message(problem: Any, form: type[_Checked]) -> str:
    path = [str(key) for key in problem["loc"]]
    if problem["type"] in _STRANGE:
        model = _MODELS.get(".".join(path[:-1])) or _ROWS.get(".".join(path[:-2]), form)
        return unknown("key", path[-1], model.model_fields) + (f" It is in {path[-2]}." if path[1:] else "")
    key = ".".join(path)
    if problem["type"] == "missing":
        return f"the key '{key}' is missing; add {key}: VALUE."
    return f"{key} is {problem['input']!r}, but {problem['msg'][0].lower()}{problem['msg'][1:]}."
