"""Plans beside a plan: specs that change one decision of it."""

import re
from collections.abc import Iterator

# Options of plans that trade seconds for memory or for another use of links: the values to try.
_VALUES = {
    "stage": ("1", "2", "3"),
    "recompute": ("none", "selective", "full"),
    "zero": ("0", "1"),
    "sequence": ("true",),
    "chunks": ("1", "2"),
}
_SWITCH = {"true": "false", "false": "true"}
# Options of plans that stand last, and may be missing.
_MORE = {"hybrid": ("recompute=full", "zero=1", "sequence=true"), "fsdp": ("recompute=true", "microbatches=2")}


def neighbours(spec: str) -> Iterator[str]:
    """Yield specs that differ from a plan's in one decision: recomputation, the stage of ZeRO, twice or half as many
    microbatches, another number of chunks, a switch, the loss in parts. Some may not exist for a model.

    >>> list(neighbours("zero:8,stage=1"))
    ['zero:8,stage=2', 'zero:8,stage=3', 'zero:8,stage=1 x recompute', 'zero:8,stage=1 x chunked_loss']
    """
    known = dict(re.findall(r"\b(\w+)=([\w.]+)", spec))
    for key, value in known.items():
        others = [v for v in _VALUES.get(key, ()) if v != value]
        if value in _SWITCH:
            others = [_SWITCH[value]]
        if key == "microbatches" and value.isdigit():
            others = [str(n) for n in (int(value) * 2, int(value) // 2) if n]
        for other in others:
            yield re.sub(rf"\b{key}={re.escape(value)}(?=,|\s|$)", f"{key}={other}", spec)
    terms = re.split(r"\s+x\s+", spec)
    names = [re.split(r"[:,]", term)[0] for term in terms]
    if names[-1] in _MORE:
        more = (option for option in _MORE[names[-1]] if option.partition("=")[0] not in known)
        yield from (f"{spec}{',' if ':' in terms[-1] else ':'}{option}" for option in more)
    elif "recompute" in names:
        yield from (" x ".join(t for t, name in zip(terms, names, strict=True) if name != "recompute"),)
    else:
        yield f"{spec} x recompute"
    if "chunked_loss" not in names:
        yield f"{spec} x chunked_loss"
    if "data_parallel" in names:
        size = re.search(r"data_parallel:(\d+)", spec)
        yield from (
            re.sub(r"data_parallel(:\d+)?", f"zero:{size[1]},stage={k}" if size else f"zero:stage={k}", spec)
            for k in (1, 3)
        )
