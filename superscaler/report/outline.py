"""The step of a saved plan in characters, with the seconds of counts. It needs no torch, so it is drawn immediately."""

from pathlib import Path

from superscaler.cluster import Cluster
from superscaler.report.details import Details
from superscaler.report.raster import drawing
from superscaler.report.schema import Account
from superscaler.report.timeline import predicted
from superscaler.simulate.clock import clock
from superscaler.simulate.counts import Counts, unit, with_speeds
from superscaler.store.plan import EXPLAIN_FILE, read_plan
from superscaler.store.program import program_of


def outline(directory: Path) -> str:
    """Return the devices of a saved plan by time, in lines of characters; the last line explains the seconds."""
    saved = read_plan(directory)
    program, cluster = program_of(saved), with_speeds(Cluster.parse(saved.head["cluster"]))[0]
    speeds = cluster.device_kind.speeds if cluster.device_kind else None
    assert speeds is not None
    counts = Counts(program, speeds)
    table = clock(program, cluster, counts.seconds, launch=speeds.issue, slowdown=speeds.slowdown, moved=counts.moved)
    details = Details(program, saved.json(EXPLAIN_FILE, Account), "")
    drawn = drawing(predicted(table, program, details), details)
    return (
        f"devices by time: {drawn}\n  {unit(speeds)}\n  superscaler explain {directory} --timeline counts each kernel"
    )
