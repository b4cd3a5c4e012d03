"""The meeting of ranks: torchrun's environment, the common store of all ranks, and the network between them."""

import fcntl
import os
import socket
import struct
import time
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from superscaler.errors import InputError, RuntimeFailure

# Seconds that ranks wait for each other (imports may be slow), and for the store of torchrun, which runs already.
_MEET, _REACH, _POLL = 300.0, 30.0, 0.02
# Linux: the ioctl that returns the address of an interface. An unassigned address: its route leads outside.
_SIOCGIFADDR, _ELSEWHERE = 0x8915, "192.0.2.1"


@dataclass(frozen=True, slots=True)
class Launched:
    """The launch data of a rank from torchrun: its numbers, those of ranks and servers, the store's address."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1
    servers: int = 1
    host: str = ""
    port: int = 0


def launched() -> Launched:
    """Return the launch data in the environment; alone, rank 0 of 1. Raises InputError for inconsistent variables."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    world = _number("WORLD_SIZE", 1)
    if missing and world != 1:
        raise InputError(f"WORLD_SIZE is set, but {', '.join(missing)} not: start this program with torchrun.")
    local_rank = _number("LOCAL_RANK", 0)
    if missing:
        return Launched(local_rank=local_rank)
    rank, port = _number("RANK", 0, world - 1), _number("MASTER_PORT", 1, 2**16 - 1)
    return Launched(rank, local_rank, world, _number("GROUP_WORLD_SIZE", 1), os.environ["MASTER_ADDR"], port)


def _number(name: str, low: int, high: int | None = None) -> int:
    text = os.environ.get(name, str(low))
    if not text.isdecimal() or int(text) < low or (high is not None and int(text) > high):
        limits = f"of {low} or more" if high is None else f"from {low} to {high}"
        raise InputError(f"{name} is {text!r}, but must be a number {limits}; start this program with torchrun.")
    return int(text)


def meet(launch: Launched) -> tuple[Store, str]:
    """Return the common store of all ranks, and a new name of this start.

    torchrun keeps one store over the restarts of its ranks, with all their entries. Raises RuntimeFailure for a store
    that cannot be reached, and for missing ranks.
    """
    store = HashStore() if not launch.host else _store(launch)
    own = uuid4().hex
    try:
        if launch.rank == 0:
            _welcome(store, launch, own)
            return store, own
        store.set(f"rank{launch.rank}", own)
        start = store.get(f"welcome {own}").decode()
        store.set(f"{start} rank{launch.rank}", "here")
    except dist.DistError:
        raise RuntimeFailure(
            f"rank {launch.rank} on {socket.gethostname()} waited {_MEET:.0f} s for rank 0, which did not come; "
            "see what it says on its server."
        ) from None
    return store, start


def _store(launch: Launched) -> Store:
    # Rank 0 keeps the store if torchrun does not.
    is_there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_ours, limit = not is_there and launch.rank == 0, timedelta(seconds=_REACH if is_there else _MEET)
    try:
        store = TCPStore(launch.host, launch.port, is_master=is_ours, timeout=limit)
    except dist.DistError as error:
        raise RuntimeFailure(
            f"rank {launch.rank} on {socket.gethostname()} cannot reach {launch.host}:{launch.port}, the store of this "
            f"launch ({str(error).splitlines()[0].rstrip('.')}); if {launch.host} is no name here of the server "
            "that has it, start torchrun on every server with --local-addr ADDRESS, its own, by which the others reach "
            "it."
        ) from None
    store.set_timeout(timedelta(seconds=_MEET))
    return store


def _welcome(store: Store, launch: Launched, start: str) -> None:
    """Give every arriving rank the name of this start, until all have it. Entries of ended ranks do no harm."""
    deadline = time.monotonic() + _MEET
    left = list(range(1, launch.world))
    while left:
        for rank in left:
            if store.check([f"rank{rank}"]):
                store.set(f"welcome {store.get(f'rank{rank}').decode()}", start)
        left = [rank for rank in left if not store.check([f"{start} rank{rank}"])]
        if left and time.monotonic() > deadline:
            missing = ", ".join(map(str, left[:8])) + (", ..." if len(left) > 8 else "")
            raise RuntimeFailure(
                f"{len(left)} of {launch.world} ranks did not come within {_MEET:.0f} s: {missing}; look at the output "
                f"of these ranks, and whether their servers reach {launch.host}:{launch.port}."
            )
        time.sleep(_POLL)


def interface(launch: Launched) -> str | None:
    """Return the network interface by which this rank reaches the others, None if it is unknown.

    It is the interface to the store: the loopback for ranks of one server. If the first of several servers has the
    store's name on its own loopback, it is the interface to the outside.
    """
    address = _source(launch.host)
    if launch.servers > 1 and (address is None or address.startswith("127.")):
        address = _source(_ELSEWHERE)
    return None if address is None else _interface_of(address)


def _source(host: str) -> str | None:
    """Return the address from which this machine would send to a host. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
