"""Orders as text: they are the tables of the rules, train as one device does, and are refused where they make none."""

from __future__ import annotations

import pytest

import superscaler as ss
from superscaler.errors import InputError
from superscaler.plans.lib import schedules
from superscaler.plans.lib.order_text import is_order, print_order, table_of_order
from superscaler.report.block_summary import summary
from tests.helpers.graphs import graph_of
from tests.helpers.ran import equal
from tests.helpers.sweeps import slow

GPT = "gpt2:size=tiny,layers=4,batch=8"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pipeline_1f1b", "FF(FB)BB/F(FB)B/(FB)"),
        ("zb_h1", "FF(FIW)IWIW/FFI(FIW)IWW/FIFI(FIW)WW"),
        ("zb_h2", "FFFF(FIW)IWIWIWIW/FFFIFI(FIW)IWIWWW/FIFIFIFI(FIW)WWWW"),
        *((name, "") for name in ("gpipe", "interleaved", "breadth_first", "zbv", "dualpipe_v")),
    ],
)
def test_the_tables_of_rules_are_orders_as_text(name: str, text: str) -> None:
    table = schedules.RULES[name](3, 9)
    printed = print_order([[(work.stage, work.kind) for work in row] for row in table])
    assert table_of_order(printed, 3, 9) == table
    assert printed == text or not text
    if text:
        assert table_of_order(text, 3, 12) == schedules.RULES[name](3, 12)


@pytest.mark.parametrize(
    "plan",
    [
        "pipeline:schedule=FF(FB)BB/F(FIW)IW,microbatches=4,blocks=3+1",
        *slow(
            "pipeline:2,schedule=FFFBFBBB/FBFBFBFB x data_parallel:2",
            "pipeline:schedule=0F3F3B0F0B3F3I0B3W/1F2F2B1F1B2F2B1B,recompute=late",
        ),
    ],
)
def test_an_order_trains_as_one_device_does(plan: str) -> None:
    count = 4 if "data_parallel" in plan else 2
    equal(graph_of(GPT, "SGD"), plan, count)


def test_the_work_of_an_order_is_in_its_rows() -> None:
    """Its text says so without a number of microbatches, where nothing repeats."""
    plan = ss.compile(graph_of(GPT), "pipeline:schedule=FFFBFBBB/FBFBFBFB", "local:2")
    told = summary(plan.compiled)
    assert "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3" in told
    assert "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3" in told


@pytest.mark.parametrize(
    ("order", "error"),
    [
        ("F(FB)B", "order F(FB)B has 1 rows, but the pipeline 2 devices; write a row for each."),
        ("F(FB)B/FFB", "row 1 of an order, FFB, has 2 1F, which makes no 4 microbatches"),
        ("F(FFB)B/(FB)", "row 0 of an order, F(FFB)B, has 1 0F and 2 in each turn, which makes no 4 microbatches"),
        ("(FB)/(BF)", "1B0 waits for 1F0, at step 1 of device 1, for ever"),
        ("(FB)/(FI)", "microbatch 0 of stage 1 has FI, not FB or FIW"),
        ("(FB)/(FWI)", "1W0 is there already, at step 1"),
        ("(FB)/(FB", "unknown schedule '(FB)/(FB'"),
        ("(FB)/(FB),chunks=2", "has its stages in it, and no choice of chunks; leave chunks out."),
        ("(999999999F999999999B)/(FB)", "do not fit a model of"),
    ],
)
def test_an_order_that_makes_no_step_is_refused(order: str, error: str) -> None:
    with pytest.raises(InputError) as found:
        ss.compile(graph_of(GPT), f"pipeline:schedule={order},microbatches=4", "local:2")
    assert error in str(found.value)


def test_what_is_no_order_is_a_name_or_a_file() -> None:
    assert not any(map(is_order, ("", "zb_h1", "F/", "/F", "F(F)(B)", "0", "f(fb)b")))
