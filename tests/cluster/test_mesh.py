"""Named axes of devices: their sizes, their places, and what does not fit."""

from __future__ import annotations

import re

import pytest

from superscaler.cluster import Cluster
from superscaler.errors import InputError


def test_places_along_some_axes_are_a_mesh_of_the_others() -> None:
    mesh = Cluster.local(12).mesh(pp=2, dp=-1, tp=2)
    assert str(mesh) == "pp=2,dp=3,tp=2"
    assert [device.id for device in mesh.at(pp=1, tp=0).devices] == [6, 8, 10]
    assert mesh.at(dp=2).sizes == {"pp": 2, "tp": 2}
    assert [device.id for device in mesh.at(pp=1, dp=1, tp=1).devices] == [9]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp": 2, "tp": 3}, "mesh dp=2,tp=3 needs 6 devices, but there are 8; make the two numbers equal"),
        ({"dp": 3, "tp": -1}, "mesh dp=3,tp=-1: 3 does not divide the 8 devices; choose 1, 2, 4 or 8"),
        ({"dp": -1, "tp": -1}, "mesh dp=-1,tp=-1: every size must be at least 1, and one may be -1"),
        ({"dp": 0, "tp": 8}, "mesh dp=0,tp=8: every size must be at least 1"),
        ({"dp": 8.0}, "mesh dp=8.0: every size must be at least 1"),
    ],
)
def test_sizes_that_are_not_the_number_of_devices_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Cluster.local(8).mesh(**sizes)


def test_places_that_a_mesh_lacks_are_refused() -> None:
    mesh = Cluster.local(8).mesh(data=2, tensor=4)
    with pytest.raises(InputError, match=r"mesh data=2,tensor=4: unknown axis 'date'; did you mean 'data'"):
        mesh.at(date=1)
    with pytest.raises(InputError, match=r"has places 0 to 3 along tensor, but not 4"):
        mesh.at(tensor=4)
