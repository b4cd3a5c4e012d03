"""The plan from a table: each choice where it says, equal to the model, and every wrong table refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import superscaler as ss
from superscaler.errors import InputError
from superscaler.plans import flexible as module
from superscaler.plans.flexible import flexible
from tests.helpers.graphs import graph_of
from tests.helpers.ran import equal
from tests.verbs.chains import chain


def test_the_example_of_the_docstring_equals_the_model(tmp_path: Path) -> None:
    file = tmp_path / "choices.yaml"
    file.write_text(str(module.__doc__).split("\n\n")[1])
    equal(graph_of("gpt2:size=tiny"), f"flexible:choices={file}", 4)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"batch": "dp"}, [0, 1, 2, 3]),
        ({"hidden": "tp", "batch": "dp"}, [0, 2, 1, 3]),
        ({"hidden": 2}, [0, 1, 2, 3] * 2),
        ({"hidden": [1, 5], "batch": 2, "devices": [3, 2, 1, 0]}, [3, 2, 1, 0]),
        ({"hidden": [1, 5], "devices": [3, 2, 1, 0]}, [3, 2, 1, 0]),
        ({"devices": [2]}, [2]),
    ],
)
def test_each_module_is_where_its_row_says(row: dict[str, Any], expected: list[int]) -> None:
    graph = chain()
    table = {"mesh": {"dp": 2, "tp": 2}, "modules": {"*": {"batch": "dp"}, "blocks.1": row}}
    flexible(graph, ss.Cluster.local(4), table)
    assert graph.rows(graph.op("mul1")).device.tolist() == expected
    assert graph.rows(graph.op("mul0")).device.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"module": {}}, "choices: the table: unknown key 'module'; did you mean 'modules'"),
        ({"modules": None}, "choices: the table: modules is None, but it must be a table of names"),
        ({"microbatches": "2"}, "choices: the table: microbatches is '2', but it must be an integer"),
        ({"modules": {"block.0": {}}}, "choices: unknown module 'block.0'; did you mean 'blocks.0'"),
        ({"modules": {"*": {"bach": 2}}}, "unknown factor 'bach'; did you mean 'batch'"),
        ({"modules": {"*": {"batch": "copy"}}}, r"\*: batch: unknown axis of the mesh 'copy'; did you mean 'copies'"),
        ({"modules": {"*": {"batch": {"axes": "dp"}}}}, r"\*: batch: unknown key 'axes'; did you mean 'axis'"),
        ({"modules": {"*": {"batch": {}}}}, r"cannot be made into 0 parts"),
        ({"modules": {"*": {"batch": {"sizes": 4}}}}, r"\*: batch: sizes is 4, but it must be a list"),
        ({"modules": {"*": {"batch": 2.5}}}, r"\*: batch is 2.5, but it must be a table"),
        ({"modules": {"*": {"batch": 3}}}, "has 8 elements of batch .*Choose 1, 2, 4 or 8"),
        ({"modules": {"*": {"batch": [4, 3]}}}, r"covers 7 elements, but mul0 \(blocks.0\) has 8"),
        ({"modules": {"*": {"batch": 4, "devices": [0, 1]}}}, "batch=4,copies=-1: 4 does not divide the 2 devices"),
        ({"modules": {"*": {"devices": 3}}}, r"\*: devices is 3, but it must be a list"),
        ({"mesh": {"dp": 3}, "modules": {}}, "mesh dp=3 needs 3 devices, but there are 4"),
        ({"mesh": 4, "modules": {}}, "mesh is 4, but it must be a table of names"),
        ("", "flexible needs a table; give choices=FILE.yaml"),
        ("no.yaml", "choices=no.yaml cannot be read: .*No such file"),
    ],
)
def test_a_wrong_table_is_refused(table: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        flexible(chain(), ss.Cluster.local(4), table)
