"""What is known of the kinds of device, each in a file of `presets`. Their form is that of cluster files."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from superscaler.cluster.devices import Preset

_FOLDER = Path(__file__).parent / "presets"


class _Presets(Mapping[str, Preset]):
    """The presets by name. A file is read when its preset is first used."""

    def __getitem__(self, name: str) -> Preset:
        if name not in _names():
            raise KeyError(name)
        return _read(name)

    def __contains__(self, name: object) -> bool:
        return name in _names()

    def __iter__(self) -> Iterator[str]:
        return iter(_names())

    def __len__(self) -> int:
        return len(_names())


PRESETS: Mapping[str, Preset] = _Presets()


@cache
def _names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


# The file's reader is imported late: it needs YAML and its checks, and takes a tenth of a second.
@cache
def _read(name: str) -> Preset:
    from superscaler.cluster.file import read_preset

    path = _FOLDER / f"{name}.yaml"
    return read_preset(path.read_text(encoding="utf-8"), f"preset {path}", name, PRESETS)
