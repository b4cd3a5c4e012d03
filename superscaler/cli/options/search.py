"""The options of `superscaler search`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superscaler.cli.options.declare import option, path
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

    out: Annotated[
        Path | None, path("--out", "FILE.py", "Write the plan with its reasons into a new file, for --plan.", "file")
    ] = None

    def check_search(self, spec: str) -> tuple[Cluster, list[int]]:
        """Return the cluster and the batches. Raises InputError for options that cannot be read, are out of range, or
        do not go with the cluster, by its spec.
        """
        from superscaler.cluster import Cluster
        from superscaler.planner import constraints
        from superscaler.plans import resolve

        cluster = Cluster.parse(spec)
        self.check()
        if self.top < 1:
            raise InputError(f"--top {self.top}: give 1 or more.")
        if self.seconds is not None and not self.seconds > 0:
            raise InputError(f"--seconds {self.seconds}: give a number above 0.")
        if self.out is not None:
            _check_out(self.out)
        self._check_measure(cluster, spec)
        constraints.read(self.where, cluster.devices_per_server)
        for other in self.why_not or ():
            resolve(other)
        batches = constraints.read_batches(self.batch)
        from superscaler.simulate.predict import check_speeds

        check_speeds(cluster)
        return cluster, batches

    def _check_measure(self, cluster: Cluster, spec: str) -> None:
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


def _check_out(out: Path) -> None:
    """Raise InputError for a file that is there, or cannot be one of Python."""
    if out.suffix != ".py":
        raise InputError(f"--out {out}: a plan is a file of Python; name it {out.name}.py.")
    if out.exists() or out.is_symlink():
        raise InputError(f"--out {out} is there, and stays as it is; name a new file, or remove that one.")
    if not out.absolute().parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}; make it first.")
