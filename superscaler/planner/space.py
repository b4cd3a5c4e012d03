"""The space of plans: how stages use their devices, and the specs that say so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from superscaler.cluster import Cluster

# Names of the decisions, as `--where` and the answer have them.
RECOMPUTE = {"none": "", "selective": "attention", "full": "block"}
SCHEDULES = ("1f1b", "interleaved", "zb_h1")
# The most rows of a microbatch on a device.
MOST_ROWS = 16
# The most devices of pipelines under ZeRO. Data-parallel devices do not fold there: more take minutes to compile.
_UNFOLDED = 256


class Use(NamedTuple):
    """How the devices of a stage compute a microbatch of `rows`: on `tp` devices, with `recompute`. `sequence`: what
    tensor parallelism leaves whole is cut along the sequence.
    """

    tp: int
    sequence: bool
    recompute: str
    rows: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan of the space: `dp` x `tp` devices in each of `pp` stages, `microbatches` of `rows` a device.

    recompute  none, selective (attention), full (each block)
    zero       0: all data-parallel devices have all weights; 1, 3: as the stages of ZeRO
    schedule   1f1b, interleaved, zb_h1; of `pp` = 1: 1f1b
    chunks     stages on each device
    blocks     of each stage; () for one stage
    """

    dp: int
    tp: int
    pp: int
    rows: int
    microbatches: int
    sequence: bool = False
    recompute: str = "none"
    zero: int = 0
    schedule: str = "1f1b"
    chunks: int = 1
    blocks: tuple[int, ...] = ()

    @property
    def batch(self) -> int:
        """Return the rows of a step, of all devices."""
        return self.dp * self.rows * self.microbatches

    @property
    def use(self) -> Use:
        return Use(self.tp, self.sequence and self.tp > 1, self.recompute, self.rows)

    @property
    def spec(self) -> str:
        """Return the text of the plan, as --plan takes it."""
        return self._product if self.zero == 3 or self.schedule == "zb_h1" else self._hybrid

    @property
    def _hybrid(self) -> str:
        chosen: dict[str, object] = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "microbatches": self.microbatches}
        asked: dict[str, object] = {
            "chunks": self.chunks if self.chunks > 1 else "",
            "sequence": "true" if self.use.sequence else "",
            "recompute": self.recompute if self.recompute != "none" else "",
            "zero": self.zero or "",
            "blocks": "+".join(map(str, self.blocks)),
        }
        chosen |= {key: value for key, value in asked.items() if value}
        return "hybrid:" + ",".join(f"{key}={value}" for key, value in chosen.items())

    @property
    def _product(self) -> str:
        terms, microbatches = [], f"microbatches={self.microbatches}"
        if self.pp > 1:
            blocks = f",blocks={'+'.join(map(str, self.blocks))}" if self.blocks else ""
            terms.append(f"pipeline:{self.pp},schedule={self.schedule},{microbatches}{blocks}")
        if self.zero == 3:
            again = ",recompute=true" if self.recompute == "full" else ""
            terms.append(f"fsdp:{self.dp},{microbatches}{again}")
        elif self.dp > 1:
            terms.append(f"zero:{self.dp},stage=1" if self.zero else f"data_parallel:{self.dp}")
        if self.tp > 1:
            terms.append(f"{'sequence' if self.sequence else 'tensor'}_parallel:{self.tp}")
        if self.zero < 3 and (what := RECOMPUTE[self.recompute]):
            terms.append(f"recompute:1,what={what}")
        return " x ".join(terms)


def choices(cluster: Cluster, batch: int, blocks: int, sequence: bool) -> Iterator[Choice]:
    """Yield the plans for a batch of so many rows and a model of so many blocks; some may not hold for a model."""
    return _choices(len(cluster.devices), cluster.devices_per_server, batch, blocks, sequence)


def nearest(cluster: Cluster, batch: int, blocks: int) -> tuple[list[int], int]:
    """Return the batches next to one that have plans on a cluster, the smaller first, and the most of its whole servers
    (its devices, if it has one server) on which this batch has one.
    """

    def has_any(count: int, rows: int) -> bool:
        return any(True for _ in _choices(count, cluster.devices_per_server, rows, blocks, False))

    count, unit = len(cluster.devices), cluster.devices_per_server
    unit = unit if count > unit else 1
    ways = range(batch - 1, 0, -1), range(batch + 1, batch + count + 1)
    found = [next((rows for rows in way if has_any(count, rows)), None) for way in ways]
    fewer = next(n for n in range(count - unit, -1, -unit) if n == 0 or has_any(n, batch))
    return [rows for rows in found if rows], fewer


def _choices(count: int, per_server: int, batch: int, blocks: int, sequence: bool) -> Iterator[Choice]:
    for pp in (n for n in divisors(count) if n <= max(blocks, 1)):
        for tp in (n for n in divisors(count // pp) if n <= per_server):
            dp = count // pp // tp
            for rows in (n for n in divisors(batch // dp) if n <= MOST_ROWS) if batch % dp == 0 else ():
                plain = Choice(dp, tp, pp, rows, batch // dp // rows, sequence)
                yield from (c for c in _variants(plain, blocks))


def _variants(c: Choice, blocks: int) -> Iterator[Choice]:
    is_small = c.pp == 1 or c.dp * c.tp * c.pp <= _UNFOLDED
    for recompute, zero in product(RECOMPUTE, (0, 1) if c.dp > 1 and is_small else (0,)):
        own = replace(c, recompute=recompute, zero=zero)
        yield own
        for chunks in (2, 4) if c.pp > 1 and c.microbatches % c.pp == 0 else ():
            if blocks >= c.pp * chunks:
                yield replace(own, schedule="interleaved", chunks=chunks)
        if c.pp > 1:
            yield replace(own, schedule="zb_h1")
    if c.pp == 1 and c.dp > 1:
        yield from (replace(c, recompute=recompute, zero=3) for recompute in ("none", "full"))


def divisors(n: int) -> list[int]:
    """Return the numbers that divide a number, the smallest first."""
    return [k for k in range(1, n + 1) if n % k == 0]
