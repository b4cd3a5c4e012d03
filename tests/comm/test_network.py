"""How ranks find each other: what the environment says, the store of a launch over restarts, the network interface."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from superscaler.comm import network
from superscaler.comm.distributed import connect
from superscaler.comm.network import Launched, interface, launched, meet
from superscaler.errors import InputError, RuntimeFailure

GIVEN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "server0", "MASTER_PORT": "29500"}
FIRST = Launched(world=3, host="server0", port=29500)


def given(monkeypatch: pytest.MonkeyPatch, **variables: str | None) -> None:
    for name, value in {**dict.fromkeys((*GIVEN, "GROUP_WORLD_SIZE")), **variables}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)


def test_the_environment_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, **GIVEN, GROUP_WORLD_SIZE="2")
    assert launched() == Launched(1, 1, 4, 2, "server0", 29500)
    given(monkeypatch)
    assert launched() == Launched()


def test_a_rank_alone_leaves_nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started from its process next, on several servers maybe, finds its own interface."""
    given(monkeypatch)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    connect(timeout=60).close()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "WORLD_SIZE",
            "four",
            "WORLD_SIZE is 'four', but must be a number of 1 or more; start this program with torchrun.",
        ),
        ("WORLD_SIZE", "0", "WORLD_SIZE is '0', but must be a number of 1 or more"),
        ("RANK", "4", "RANK is '4', but must be a number from 0 to 3"),
        ("RANK", "-1", "RANK is '-1', but"),
        ("RANK", None, "WORLD_SIZE is set, but RANK not: start this program with torchrun."),
        ("MASTER_PORT", "http", "MASTER_PORT is 'http', but must be a number from 1 to 65535"),
        ("LOCAL_RANK", "", "LOCAL_RANK is '', but"),
    ],
)
def test_an_environment_without_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, message: str
) -> None:
    given(monkeypatch, **{**GIVEN, name: value})
    with pytest.raises(InputError) as caught:
        launched()
    assert message in str(caught.value)


def together(ranks: range) -> list[str]:
    """Return the name of a start that each of the ranks finds."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: meet(replace(FIRST, rank=rank))[1], ranks))


def test_ranks_that_are_started_again_do_not_meet_those_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(network, "_store", lambda told: store)
    # What a rank left that ended before it met the others.
    store.set("rank2", "a rank that ended")
    starts = [together(range(3)) for _ in range(2)]
    assert [len(set(start)) for start in starts] == [1, 1]
    assert starts[0][0] != starts[1][0]


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(network, "_store", lambda told: store)
    monkeypatch.setattr(network, "_MEET", 0.1)
    with pytest.raises(RuntimeFailure, match=r"2 of 3 ranks did not come within 0 s: 1, 2; .* server0:29500"):
        meet(FIRST)


def test_ranks_of_one_server_talk_over_its_loopback() -> None:
    assert interface(replace(FIRST, host="localhost")) == "lo"
    assert interface(replace(FIRST, host="localhost", servers=2)) != "lo"
    assert interface(replace(FIRST, host="no such host")) is None
