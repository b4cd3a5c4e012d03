"""The options of a prediction: how a step runs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

from superscaler.cli.options.declare import option
from superscaler.specs.options import with_key
from superscaler.specs.sizes import read_bytes, read_lengths

if TYPE_CHECKING:
    from superscaler.simulate.system import System


_FLAGS = ("torch_compile", "cuda_graph", "fused", "sum_halves", "no_prefetch", "broadcast")


@dataclass(frozen=True, kw_only=True)
class SystemOptions:
    """The memory of a device, and how a step runs on it."""

    memory: Annotated[
        str, option("--memory", "The memory of a device, as 32GB; default: what the cluster says.", "BYTES")
    ] = ""
    torch_compile: Annotated[
        bool, typer.Option("--torch-compile", help="Of a step whose segments Inductor compiles, as of train.")
    ] = False
    cuda_graph: Annotated[
        bool, typer.Option("--cuda-graph", help="Of a step that is replayed as a CUDA graph, as of train.")
    ] = False
    attention: Annotated[
        str,
        option("--attention", "Its kernel: flash1, triton (of 2023), flash2, flash3; default: torch's here.", "KERNEL"),
    ] = ""
    fused: Annotated[
        bool,
        typer.Option("--fused", help="Of a system with fused norms, activations, loss and sums, as Megatron-LM."),
    ] = False
    overlap: Annotated[
        str,
        option("--overlap", "Of tensor parallelism with products: bulk, pipelined; default: bulk if --fused.", "WAY"),
    ] = ""
    documents: Annotated[
        str, option("--documents", "Of packed rows: the tokens of each document, as 1024,512,512.", "LENGTHS")
    ] = ""
    balance: Annotated[
        float, option("--balance", "How many times the mean tokens the experts of the busiest device have.", "TIMES")
    ] = 1.0
    sum_halves: Annotated[
        bool,
        typer.Option("--sum-halves", help="Of a system that sums gradients in the 16 bits in which it sends them."),
    ] = False
    broadcast: Annotated[
        bool, typer.Option("--broadcast", help="Of a system that broadcasts whole updated weights, as InternEvo.")
    ] = False
    no_prefetch: Annotated[
        bool,
        typer.Option("--no-prefetch", help="Of a system that gathers weights beside no work, as ZeRO 1 of DeepSpeed."),
    ] = False

    def check(self) -> None:
        """Raise InputError for an option that cannot be read; it needs no torch."""
        _ = self.lengths, self.capacity

    @property
    def capacity(self) -> int | None:
        """Return the bytes of a device, None for those of the cluster."""
        return read_bytes("--memory", self.memory) if self.memory else None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the lengths of documents."""
        return read_lengths("--documents", self.documents) if self.documents else ()

    @property
    def system(self) -> System:
        """Return the assumptions of the prediction. It loads torch."""
        from superscaler.simulate.system import System

        given = {field.name: getattr(self, field.name) for field in fields(System)}
        return System(**{**given, "documents": self.lengths})

    def packed(self, model: str) -> str:
        """Return the spec of a model of the library with rows of these documents."""
        return with_key(model, "documents", "+".join(map(str, self.lengths))) if self.documents else model

    @property
    def said(self) -> str:
        """Return the options of how steps run, as they are given."""
        flags = [name for name in _FLAGS if getattr(self, name)]
        values = {name: getattr(self, name) for name in ("attention", "overlap", "documents", "balance")}
        texts = [*flags, *(f"{name} {value}" for name, value in values.items() if value not in ("", 1.0))]
        return " ".join(f"--{text.replace('_', '-')}" for text in texts)
