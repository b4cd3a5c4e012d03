"""A user's own cluster in YAML: `{name: lab, preset: v100, servers: 4, devices_per_server: 8}`."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, PositiveInt, StrictStr, ValidationError

from superscaler.errors import InputError, unknown


class ClusterFile(BaseModel):
    """What the file holds. `preset` is the kind of its devices, or `local` when nothing is known about them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: StrictStr
    preset: StrictStr
    servers: PositiveInt
    devices_per_server: PositiveInt


def read(text: str, where: str) -> ClusterFile:
    """Return what the text says. Raises InputError that names the first key that is wrong."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{where} is not YAML: {' '.join(str(error).split())}.") from None
    keys = list(ClusterFile.model_fields)
    if not isinstance(content, dict):
        raise InputError(f"{where} must be a mapping with the keys {', '.join(keys)}.")
    strange = [str(k) for k in content if k not in keys]
    if strange:
        raise InputError(f"{where}: {unknown('key', strange[0], keys)}")
    try:
        return ClusterFile.model_validate(content)
    except ValidationError as error:
        raise InputError(f"{where}: {_told(error.errors()[0])}") from None


def _told(problem: Any) -> str:
    key = problem["loc"][0]
    if problem["type"] == "missing":
        return f"the key '{key}' is missing; add {key}: VALUE."
    return f"{key} is {problem['input']!r}, but {problem['msg'][0].lower()}{problem['msg'][1:]}."
