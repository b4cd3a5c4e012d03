"""The options of `superscaler search`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from superscaler.cli.options.declare import option
from superscaler.cli.options.system import SystemOptions
from superscaler.errors import InputError

if TYPE_CHECKING:
    from superscaler.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class SearchOptions(SystemOptions):
    """What is asked of a search, and how steps run."""

    where: Annotated[
        str,
        option(
            "--where",
            "Constraints, as 'tp <= 8, no recompute, schedule in (1f1b, zb_h1), stage 0 has 5 blocks': of dp, tp, pp, "
            "microbatches, rows (of one on a device), batch, chunks, zero, recompute, schedule, layout, loss, swap.",
            "TEXT",
        ),
    ] = ""
    batch: Annotated[str, option("--batch", "Rows of a step to choose among, as 256..1024 or 256,384.", "ROWS")] = ""
    top: Annotated[int, option("--top", "The number of plans to show.")] = 5
    seconds: Annotated[
        float | None, option("--seconds", "Begin no further whole plan after so many seconds; default: no limit.")
    ] = None
    measure: Annotated[
        int | None, option("--measure", "Train so many of the best plans for some steps here, and rank them by that.")
    ] = None
    why_not: Annotated[
        list[str] | None, typer.Option("--why-not", metavar="PLAN", help="Say what speaks against it; repeatable.")
    ] = None

    def check_cluster(self, cluster: Cluster, spec: str) -> None:
        """Raise InputError for options that are out of range, or do not go with a cluster, by its spec."""
        if self.top < 1:
            raise InputError(f"--top {self.top}: give 1 or more.")
        if self.seconds is not None and not self.seconds > 0:
            raise InputError(f"--seconds {self.seconds}: give a number above 0.")
        if self.measure is None:
            return
        if self.measure < 1:
            raise InputError(f"--measure {self.measure}: give 1 or more.")
        if not cluster.is_local:
            raise InputError(
                f"--measure trains on this machine, but --cluster is {spec}; give the file that superscaler "
                "doctor --measure --out FILE.yaml writes."
            )
        if strange := [name for name in ("attention", "fused", "overlap") if getattr(self, name)]:
            raise InputError(f"--measure trains with this system's kernels; leave --{strange[0]} out.")
        if self.batch:
            raise InputError("--measure trains with the batch of MODEL; leave --batch out, or give MODEL that batch.")
