"""The space of plans: how stages use their devices, and the specs that say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from superscaler.cluster import Cluster

# The decisions for which an answer has reasons, by their names in `--where`.
DECISIONS = ("batch", "pp", "tp", "dp", "rows", "layout", "recompute", "zero", "schedule", "loss", "swap")
# The names of their values, and the terms of a product that say so.
RECOMPUTE = {
    "none": "", "selective": "recompute:1,what=attention", "full": "recompute:1,what=block",
    "co_shard": "co_shard:1,parts=4",
}  # fmt: skip
LAYOUTS = {
    "tensor": "tensor_parallel", "sequence": "sequence_parallel", "ulysses": "ulysses", "ring": "ring_attention",
    "experts": "expert_parallel", "dap": "dap",
}  # fmt: skip
LOSS = {"whole": "", "chunked": "chunked_loss:1,parts=8"}
SWAP = {"none": "", "optimizer": "swap:1,what=optimizer"}
SCHEDULES = {
    "1f1b": "pipeline_1f1b", "interleaved": "interleaved", "zb_h1": "zb_h1", "zbv": "zbv", "interlaced": "interlaced",
    "3f1b": "three_f_one_b", "chimera": "chimera", "ordered": "pipeline",
}  # fmt: skip
# What saves more memory than another value, at a price in seconds.
_PLAINER: Mapping[str, Mapping[Any, Any]] = {
    "recompute": {"co_shard": "full", "full": "selective", "selective": "none"},
    "zero": {3: 1}, "loss": {"chunked": "whole"}, "swap": {"optimizer": "none"},
}  # fmt: skip
_TENSOR = ("tensor",)
# Layouts that cut the sequence instead of the weights.
BY_SEQUENCE = "ulysses", "ring"
# Layouts in which a group has as much work as one device, or more.
SPLIT = "tensor", "sequence", *BY_SEQUENCE
# What `hybrid` says, which is shorter than a product.
_HYBRID = {"recompute": ("none", "selective", "full"), "layout": ("tensor", "sequence")}
# The most rows of a microbatch on a device.
MOST_ROWS = 16
# The most servers of tensor parallelism.
_SERVERS = 4
# The most stages of pipelines in two directions: the table of more takes long to make.
_BOTH_WAYS = 16
# The most devices of pipelines under ZeRO. Data-parallel devices do not fold there: more take minutes to compile.
_UNFOLDED = 256


class Use(NamedTuple):
    """How the `tp` devices of a stage compute a microbatch of `rows`, by the names of a `Choice`. `is_gathered`:
    weights are gathered for each block.
    """

    tp: int
    layout: str
    recompute: str
    loss: str
    rows: int
    is_gathered: bool = False

    @property
    def plain(self) -> Use:
        """Return the use that saves no memory."""
        return self._replace(recompute="none", loss="whole", is_gathered=False)


class Own(NamedTuple):
    """What a stage does in its own way, by the names of a `Choice`."""

    dp: int
    tp: int
    recompute: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan of the space: `dp` groups of `tp` devices in each of `pp` stages; a group has `microbatches` of `rows`.

    layout     the way of a group to share a microbatch: tensor; sequence: tensor parallelism, with the rest cut along
               the sequence; ulysses, ring: the sequence is cut; experts: rows and experts are; dap: the axis along
               which a model of two does not attend
    recompute  none, selective (attention), full (each block), co_shard (each block, a part of its heads at a time)
    zero       0: all data-parallel devices have all weights; 1, 3: as the stages of ZeRO
    schedule   1f1b, interleaved, zb_h1, zbv, interlaced (embedding and head on all devices), 3f1b (of models with
               several passes), chimera (half of the microbatches in each direction; each stage, and its weights, are
               on two devices), ordered (in an order of its own); of `pp` = 1: 1f1b
    chunks     stages on each device
    loss       whole, chunked: head and loss in parts of the tokens
    swap       none, optimizer: on the hosts
    blocks     of each stage; () for one stage, and for schedules that cut the model themselves
    own        what each stage does in its own way, where they differ; `dp`, `tp`, `rows` and `recompute` are then those
               of the first. `layout` is of those with several devices in a group
    order      of the works of a pipeline with the schedule `ordered`, as text (plans/lib/order_text.py)
    """

    dp: int
    tp: int
    pp: int
    rows: int
    microbatches: int
    layout: str = "tensor"
    recompute: str = "none"
    zero: int = 0
    schedule: str = "1f1b"
    chunks: int = 1
    loss: str = "whole"
    swap: str = "none"
    blocks: tuple[int, ...] = ()
    own: tuple[Own, ...] = ()
    order: str = ""

    @property
    def batch(self) -> int:
        """Return the rows of a step, of all devices."""
        return self.dp * self.rows * self.microbatches

    @property
    def stages(self) -> int:
        """Return the number of stages, in the order of the model."""
        return self.pp * self.chunks

    @property
    def directions(self) -> int:
        """Return the places of the pipeline that each stage has, and its weights, with as many shares of the
        microbatches.
        """
        return 2 if self.schedule == "chimera" else 1

    @property
    def copies(self) -> int:
        """Return the groups of `tp` devices that have the weights of a stage, and add its gradients."""
        return self.dp * self.directions

    def place(self, stage: int) -> int:
        """Return the place in the pipeline of the devices of a stage; -1 is the last stage."""
        lap, at = divmod(stage % self.stages, self.pp)
        # A V has the last stage on the first devices.
        is_back = self.schedule == "zbv" or f"{self.stages - 1}F" in self.order.partition("/")[0]
        return self.pp - 1 - at if lap and is_back else at

    def places(self, stage: int) -> tuple[int, ...]:
        """Return all places that a stage has."""
        place = self.place(stage)
        return (place, self.pp - 1 - place)[: self.directions]

    @property
    def use(self) -> Use:
        return Use(self.tp, self.layout, self.recompute, self.loss, self.rows, self.zero == 3)

    def stage(self, number: int) -> Choice:
        """Return the plan whose stages are all as one of this plan; itself if they are alike."""
        if not self.own:
            return self
        dp, tp, recompute = self.own[number]
        rows, layout = self.batch // self.microbatches // dp, self.layout if tp > 1 else "tensor"
        return replace(self, dp=dp, tp=tp, rows=rows, recompute=recompute, layout=layout, blocks=(), own=())

    def each(self, name: str) -> tuple[Any, ...]:
        """Return a decision of each stage; the one of all stages if they are alike."""
        found = tuple(getattr(self.stage(k), name) for k in range(len(self.own) or 1))
        return found[:1] if len({*found}) == 1 else found

    def said(self, name: str) -> Any:
        """Return a decision: that of all stages, or those of each in words, as 4+2."""
        found = self.each(name)
        return found[0] if len(found) == 1 else "+".join(map(str, found))

    def plainer(self) -> tuple[Choice, ...]:
        """Return the plans that each save memory in one way less: their steps are no longer."""
        return _plainer(self)

    @property
    def savings(self) -> int:
        """Return the number of ways in which the plan saves memory."""
        return sum(1 + plan.savings for plan in self.plainer()[:1])

    @property
    def is_even(self) -> bool:
        """Return whether the schedule cuts the model into its stages by itself."""
        return self.schedule in ("interleaved", "interlaced", "3f1b", "chimera")

    @property
    def spec(self) -> str:
        """Return the text of the plan, as --plan takes it."""
        is_hybrid = all(getattr(self, name) in values for name, values in _HYBRID.items())
        is_plain = self.zero < 3 and self.loss == "whole" and self.swap == "none"
        is_hybrid = is_hybrid and is_plain and (self.schedule in ("1f1b", "interleaved") or bool(self.own))
        return self._hybrid if is_hybrid else self._product

    @property
    def _hybrid(self) -> str:
        chosen: dict[str, object] = {name: self.said(name) for name in ("dp", "tp", "pp", "microbatches")}
        asked: dict[str, object] = {
            "schedule": self.order or (SCHEDULES[self.schedule] if self.schedule == "zb_h1" else ""),
            "chunks": self.chunks if self.chunks > 1 else "",
            "sequence": "true" if self.layout == "sequence" else "",
            "recompute": again if (again := self.said("recompute")) != "none" else "",
            "zero": self.zero or "",
            "blocks": "+".join(map(str, self.blocks)),
        }
        chosen |= {key: value for key, value in asked.items() if value}
        return "hybrid:" + ",".join(f"{key}={value}" for key, value in chosen.items())

    @property
    def _product(self) -> str:
        count, recompute = f"microbatches={self.microbatches}", RECOMPUTE[self.recompute]
        zero = f"fsdp:{self.dp}" if self.zero == 3 else f"zero:{self.dp},stage=1" if self.zero else ""
        terms = [self._pipeline(count)] if self.pp > 1 else []
        if self.zero == 3:
            again, recompute = (",recompute=true", "") if self.recompute == "full" else ("", recompute)
            terms.append(f"{zero},{count}{again}" if self.pp == 1 else f"{zero}{again}")
        else:
            terms += [f"gradient_accumulation:1,{count}"] if self.pp == 1 and self.microbatches > 1 else []
            terms += [zero or f"data_parallel:{self.dp}"] if self.dp > 1 else []
        terms += [f"{LAYOUTS[self.layout]}:{self.tp}"] if self.tp > 1 else []
        if self.schedule != "interlaced" or self.recompute == "co_shard":
            terms.append(recompute)
        return " x ".join(filter(None, [*terms, LOSS[self.loss], SWAP[self.swap]])) or "single"

    def _pipeline(self, count: str) -> str:
        """Return the term of the pipeline."""
        name, blocks = SCHEDULES[self.schedule], "+".join(map(str, self.blocks))
        more = [f"schedule={self.order}"] if self.order else []
        more += [f"blocks={blocks}"] if blocks else []
        more += [f"chunks={self.chunks}"] if self.schedule == "interleaved" else []
        more += ["recompute=late"] if self.schedule == "interlaced" and self.recompute == "full" else []
        return ",".join([f"{name}:{self.pp}", count, *more])


@lru_cache(maxsize=2**14)
def _plainer(c: Choice) -> tuple[Choice, ...]:
    values = ((name, less.get(getattr(c, name))) for name, less in _PLAINER.items())
    return tuple(replace(c, blocks=(), **{name: value}) for name, value in values if value is not None)


def choices(
    cluster: Cluster, batch: int, blocks: int, layouts: Sequence[str] = _TENSOR, is_coupled: bool = False
) -> Iterator[Choice]:
    """Yield the plans for a batch of so many rows and a model of so many blocks; some may not hold for a model.

    `layouts`: tensor, or sequence for models that can be cut along it; experts and dap for those that have experts, or
    two axes. `is_coupled`: all rows of a device are one microbatch.
    """
    return _choices(len(cluster.devices), cluster.devices_per_server, batch, blocks, layouts, is_coupled)


def _nearest(cluster: Cluster, batch: int, blocks: int) -> tuple[list[int], int]:
    """Return the batches next to one that have plans on a cluster, the smaller first, and the most of its whole servers
    (its devices, if it has one server) on which this batch has one.
    """

    def has_any(count: int, rows: int) -> bool:
        return any(True for _ in _choices(count, cluster.devices_per_server, rows, blocks))

    count, unit = len(cluster.devices), cluster.devices_per_server
    unit = unit if count > unit else 1
    ways = range(batch - 1, 0, -1), range(batch + 1, batch + count + 1)
    found = [next((rows for rows in way if has_any(count, rows)), None) for way in ways]
    fewer = next(n for n in range(count - unit, -1, -unit) if n == 0 or has_any(n, batch))
    return [rows for rows in found if rows], fewer


def undivided(cluster: Cluster, batches: Sequence[int], blocks: int) -> str:
    """Return the error of batches that cannot be divided among devices, with what can be."""
    rows, fewer = _nearest(cluster, batches[-1], blocks)
    given, others = ", ".join(map(str, batches)), " or ".join(map(str, rows))
    least = f", or {fewer} devices" if fewer else ""
    return (
        f"a batch of {given} cannot be divided among the {len(cluster.devices)} devices of {cluster}; take a batch of "
        f"{others}{least}."
    )


def _choices(
    count: int, per_server: int, batch: int, blocks: int, layouts: Sequence[str] = _TENSOR, is_coupled: bool = False
) -> Iterator[Choice]:
    for pp in (n for n in divisors(count) if n <= max(blocks, 1)):
        for tp in (n for n in divisors(count // pp) if n <= _SERVERS * per_server):
            dp = count // pp // tp
            for rows in _rows(batch // dp, is_coupled) if batch % dp == 0 else ():
                for layout in layouts if tp > 1 else _TENSOR:
                    if layout != "experts" or rows % tp == 0:
                        yield from _variants(Choice(dp, tp, pp, rows, batch // dp // rows, layout), blocks)
                yield from _thrifty(Choice(dp, tp, pp, rows, batch // dp // rows, layouts[0] if tp > 1 else "tensor"))


def _rows(rows: int, is_coupled: bool) -> list[int]:
    """Return the rows that a microbatch of a device may have."""
    return [rows] if is_coupled else [n for n in divisors(rows) if n <= MOST_ROWS]


def _variants(c: Choice, blocks: int) -> Iterator[Choice]:
    is_small = c.pp == 1 or c.dp * c.tp * c.pp <= _UNFOLDED
    for recompute, zero in product(tuple(RECOMPUTE)[:3], (0, 1) if c.dp > 1 and is_small else (0,)):
        yield from _schedules(replace(c, recompute=recompute, zero=zero), blocks)
    if c.pp == 1 and c.dp > 1:
        yield from (replace(c, recompute=recompute, zero=3) for recompute in ("none", "full"))


def _schedules(c: Choice, blocks: int) -> Iterator[Choice]:
    """Yield a plan under each schedule that it can have."""
    yield c
    if c.pp == 1:
        return
    for chunks in (2, 4) if c.microbatches % c.pp == 0 else ():
        if blocks >= c.pp * chunks:
            yield replace(c, schedule="interleaved", chunks=chunks)
    yield replace(c, schedule="zb_h1")
    if blocks >= 2 * c.pp and c.microbatches >= 2 * c.pp:
        yield replace(c, schedule="zbv", chunks=2)
    if c.zero or c.recompute == "selective":
        return
    yield replace(c, schedule="3f1b")
    uncut = replace(c, layout="tensor" if c.layout == "sequence" else c.layout)
    # With the sequence cut too, the step of mBART in the evaluation takes 199 s in place of 116.
    yield replace(uncut, schedule="interlaced")
    # Devices of two directions do not cut it in one way.
    if c.pp <= _BOTH_WAYS and c.pp % 2 == c.microbatches % 2 == 0:
        yield replace(uncut, schedule="chimera")


def _thrifty(c: Choice) -> Iterator[Choice]:
    """Yield what else a plan of 1F1B, or without a pipeline, can do against a lack of memory, or of rows."""
    for zero in (0, 1, 3) if c.dp > 1 and c.pp == 1 else (0,):
        own = replace(c, zero=zero)
        yield replace(own, recompute="co_shard")
        for recompute in ("none", "full"):
            yield replace(own, loss="chunked", recompute=recompute)
            if c.tp > 1:
                yield from (replace(own, layout=layout, recompute=recompute) for layout in BY_SEQUENCE)
            if zero == 0:
                yield replace(own, swap="optimizer", recompute=recompute)


def divisors(n: int) -> list[int]:
    """Return the numbers that divide a number, the smallest first."""
    return [k for k in range(1, n + 1) if n % k == 0]
