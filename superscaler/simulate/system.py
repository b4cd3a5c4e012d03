"""What a system runs that a program does not say: how steps are loaded, the kernel of attention, fused operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import cast

from superscaler.cluster import Cluster
from superscaler.cluster.devices import Speeds
from superscaler.errors import InputError, unknown
from superscaler.ir.cohorts import Cohort, cohorts
from superscaler.ir.grid import Ints
from superscaler.ir.model import Op, width
from superscaler.ir.program import Collective, Instruction, Meets, Program, reads
from superscaler.runtime.functions.documents import packing
from superscaler.runtime.functions.tracing import recorded as static
from superscaler.simulate.kernels import Kernels
from superscaler.simulate.liveness import parameters
from superscaler.simulate.prediction import Attention
from superscaler.simulate.rates import is_attention, scores_of
from superscaler.simulate.timetable import Timetable
from superscaler.simulate.transfers.beside import Overlap
from superscaler.simulate.works import Kernel
from superscaler.specs.arguments import checked_class

# NeMo's words.
_BULK, _PIPELINED = OVERLAPS = ("bulk", "pipelined")

# The operators of a mixture of experts, and of the rows that a plan with a capacity sends to them.
EXPERTS, ROWS = "ss.experts", "ss.expert_rows"


@checked_class
@dataclass(frozen=True, slots=True)
class System:
    """The assumptions of a prediction.

    torch_compile, cuda_graph  the step is loaded with it, as by `ss.load`
    attention   the kernel of fused attention, as flash1; nothing: the one that torch takes on this kind of device
    fused       norms, activations, rotary embeddings and the loss are fused, and a product adds its gradient to the sum
                of a weight, as in Megatron-LM with Transformer Engine
    overlap     communication of tensor parallelism beside products: in `bulk` beside those that do not need it, as in
                Megatron-LM, or `pipelined`, also beside those that do (transfers/beside.py); default: in bulk if fused
    documents   the lengths of the documents of each row, again and again; nothing: a row is one document
    balance     how many times the mean tokens the experts of the busiest device have: the others wait for it
    sum_halves  gradients that are sent in 16 bits are also summed over microbatches in these, as in torch's own `.grad`
    no_prefetch no work runs beside gathers of weights: updated weights are whole before a step goes on, as under ZeRO 1
                and 2 of DeepSpeed, in InternEvo, and in Megatron-LM without its --overlap-param-gather
    broadcast   devices update whole weights, which they broadcast one by one, as in InternEvo, in place of slices that
                are gathered in buckets
    """

    torch_compile: bool = False
    cuda_graph: bool = False
    attention: str = ""
    fused: bool = False
    overlap: str = ""
    documents: tuple[int, ...] = ()
    balance: float = 1.0
    sum_halves: bool = False
    no_prefetch: bool = False
    broadcast: bool = False

    def __post_init__(self) -> None:
        if self.overlap not in ("", *OVERLAPS):
            raise InputError(f"--overlap: {unknown('overlap', self.overlap, OVERLAPS)}")
        if any(length < 1 for length in self.documents):
            raise InputError(
                f"documents={list(self.documents)}: a document has one token or more; leave the others out."
            )

    @property
    def is_compiled(self) -> bool:
        """Return whether segments are compiled: a system with fused operators has those of compiled ones."""
        return self.torch_compile or self.fused

    def overlaps(
        self, seconds: Callable[[Kernel], float], slowdown: float, weights: Iterable[str], is_gpu: bool
    ) -> Overlap | None:
        """Return the overlap with products, None for none. `seconds`: of a kernel."""
        way = self._overlap(is_gpu)
        return Overlap(seconds, slowdown, way == _PIPELINED, frozenset(weights)) if way else None

    def _overlap(self, is_gpu: bool) -> str:
        return (self.overlap or (_BULK if self.fused else "")) if is_gpu else ""

    def speeds(self, speeds: Speeds, cluster: Cluster) -> Speeds:
        """Return the speeds of a kind of device with this system's attention. Raises InputError if it has no speeds."""
        if not self.attention:
            return speeds
        if not speeds.attentions:
            raise InputError(f"--attention {self.attention}: only one attention is known on {cluster}; leave it out.")
        if self.attention not in speeds.attentions:
            raise InputError(f"--attention on {cluster}: {unknown('attention', self.attention, speeds.attentions)}")
        return replace(speeds, attention={**speeds.attention, **speeds.attentions[self.attention]})

    def summed(self, program: Program) -> Program:
        """Return the program with the sums of this system: itself if it sends float32, or has no halves."""
        if not self.sum_halves:
            return program
        weights = parameters(program)
        code = (i for cohort in cohorts(program) for i in cohort.code[:])
        sent = {width(i.sent) for i in code if i.sent and _sends_gradient(i, weights)}
        if sent and width("bfloat16") not in sent:
            return program
        functions = tuple(replace(function, wide=()) for function in program.functions)
        return program if functions == program.functions else replace(program, functions=functions)

    def awaited(self, program: Program) -> Callable[[Cohort], Set[int]]:
        """Return a function that gives the numbers of the collectives of a cohort beside which no work runs."""
        weights = parameters(program) if self.no_prefetch else frozenset[str]()
        return cache(lambda cohort: {at for at, _ in _gathers(cohort, weights)})

    def owned(self, program: Program) -> Callable[[Cohort], Mapping[int, float]]:
        """Return a function that gives, by the number of a gather of a cohort, the broadcasts in its place. A device
        sends all of its weights together: so there are at most as many as devices, of all weights.
        """
        weights = parameters(program) if self.broadcast else frozenset[str]()

        @cache
        def found(cohort: Cohort) -> Mapping[int, float]:
            gathers = list(_gathers(cohort, weights))
            every = {source for _, i in gathers for source in i.sources}
            return {at: len(i.sources) * min(1.0, len(i.group) / len(every)) for at, i in gathers}

        return found

    def check(self, targets: Set[str], cluster: Cluster, is_gpu: bool) -> None:
        """Raise InputError for a balance of experts that a model with operators of these targets does not have, and for
        a CUDA graph on a cluster without GPUs.
        """
        if self.cuda_graph and not is_gpu:
            raise InputError(f"--cuda-graph replays steps on GPUs, but {cluster} has none; leave it out.")
        if not 1 <= self.balance < inf:
            raise InputError(f"--balance {self.balance:g}: give 1 (as many tokens each) or more.")
        if self.balance > 1 and ROWS in targets:
            raise InputError(
                f"--balance {self.balance:g}: experts of this plan have as many rows as its capacity says; give "
                f"expert_parallel:capacity={self.balance:g}."
            )
        if self.balance > 1 and EXPERTS not in targets:
            raise InputError(f"--balance {self.balance:g}: the model has no mixture of experts; leave it out.")

    def words(self, is_gpu: bool, targets: Set[str]) -> Iterator[str]:
        """Yield the assumptions about kernels, for a model with operators of these `targets`."""
        compiled = "operators fused by Inductor" if self.torch_compile else "operators run one by one"
        yield "norms, activations, loss and sums of gradients fused" if self.fused else compiled
        if overlap := self._overlap(is_gpu):
            yield f"communication of tensor parallelism beside products ({overlap})"
        if is_gpu:
            yield f"attention of {self.attention}" if self.attention else "torch's attention"
        if self.balance > 1:
            yield f"{self.balance:g} times the mean tokens for the experts of the busiest device"
        elif EXPERTS in targets:
            yield "as many tokens for each expert"
        elif ROWS in targets:
            yield "all rows of each expert's capacity in use"
        if self.sum_halves:
            yield "gradients summed in 16 bits"
        if self.no_prefetch:
            yield "no work beside gathers of weights"
        if self.broadcast:
            yield "weights broadcast one by one"
        if self.cuda_graph:
            yield "replayed as a CUDA graph"
        if self.documents:
            yield f"rows of documents of {', '.join(map(str, self.documents))} tokens"

    @contextmanager
    def run(self, program: Program) -> Iterator[None]:
        """Record segments with the documents of this system in the block, and with the fixed shapes of a CUDA graph.

        Raises InputError for a program without attention inside documents.
        """
        has_documents = any(map(reads_documents, (op for function in program.functions for op in function.ops)))
        self.check_documents(has_documents)
        with packing(self.documents), static() if self.cuda_graph and has_documents else nullcontext():
            yield

    def check_documents(self, has_documents: bool) -> None:
        """Raise InputError for lengths of documents, if a model has no attention inside documents."""
        if self.documents and not has_documents:
            raise InputError(
                f"--documents {','.join(map(str, self.documents))}: the model has no attention inside documents; give "
                "one with position_ids that begin again in each, as llama:documents=1024+512+512, or leave it out."
            )


def _sends_gradient(i: Instruction, weights: Set[str]) -> bool:
    return any(value.is_gradient and value.name in weights for value in reads(i))


def _gathers(cohort: Cohort, weights: Set[str]) -> Iterator[tuple[int, Collective]]:
    """Yield each gather of weights of a cohort with its number."""
    for at, i in enumerate(cohort.code[:] if weights else ()):
        if i.meets is Meets.GROUP and any(v.name in weights and not v.is_gradient for v in reads(i)):
            yield at, cast("Collective", i)


def reads_documents(op: Op) -> bool:
    return op.target == "ss.attention_documents" or "documents" in dict(op.kwargs)


def attention_of(
    table: Timetable, known: Mapping[int, tuple[Sequence[Sequence[Kernels]], Ints]], seconds: Callable[[Kernel], float]
) -> Attention:
    """Return the attention of each device. `known`: by cohort, the kernels of its variants, and that of each device."""
    found = dict[int, tuple[int, float]]()
    for number, lane in enumerate(table.lanes):
        works, like = known[number]
        own = [_attention(each, seconds) for each in works]
        found |= {int(device): own[like[row]] for row, device in enumerate(lane.devices)}
    scores, times = zip(*(found[rank] for rank in sorted(found)), strict=True)
    return Attention(scores, times)


def _attention(works: Iterable[Kernels], seconds: Callable[[Kernel], float]) -> tuple[int, float]:
    """Return the scores that attention computes forward, without hidden ones, and its seconds in both directions."""
    found = [kernel for kernels in works for kernel in kernels if is_attention(kernel)]
    forward = (scores_of(kernel, 1) for kernel in found if "backward" not in kernel.name)
    return round(sum(rows * keys for rows, keys, _ in forward)), sum(map(seconds, found))


PLAIN = System()
