"""Two servers on one machine: network namespaces, and a link of a chosen speed between them.

Needs Linux, iproute2 (ip, tc) and util-linux (unshare, nsenter), root or user namespaces; NotPermitted says so where
they are missing. The namespaces have no name: they and their link end with the processes, however these end.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from superscaler.cluster import PRESETS, Cluster, Link

TOOLS = ("unshare", "nsenter", "ip", "tc")
ADDRESSES, PORT, INTERFACE = ("10.0.0.1", "10.0.0.2"), "29500", "between"
# A full packet has 1448 bytes of a tensor among the 1514 that tbf counts.
PAYLOAD = 1448 / 1514
PR_SET_PDEATHSIG = 1
# Set for a program that is in its own namespace.
INSIDE = "SUPERSCALER_TWO_SERVERS"


class NotPermitted(Exception):
    """This machine does not let us make namespaces and links."""


def cluster(per_server: int, mbit: float) -> Cluster:
    known = PRESETS["local"].links
    links = replace(known, network=Link(known.network.alpha, mbit * 1e6 / 8 * PAYLOAD))
    return Cluster.of("two servers", "local", 2, per_server, links)


def call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPermitted(f"`{' '.join(command)}` says: {(done.stderr.strip().splitlines() or ['nothing'])[0]}")


@contextmanager
def other_server(mbit: float) -> Iterator[list[str]]:
    """Join this namespace to a new one by a slow link; yield the command that enters it."""
    # cat ends when we do; its namespace ends with the last process in it.
    holder = subprocess.Popen(["unshare", "-n", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        holder.stdin.write("ready\n")
        holder.stdin.flush()
        if not holder.stdout.readline():
            raise NotPermitted("`unshare -n` makes no second namespace")
        enter = ["nsenter", "-t", str(holder.pid), "-n"]
        call("ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", str(holder.pid))
        # A queue that holds everything: packets that are dropped would be sent again, after a while.
        shape = ["rate", f"{mbit:g}mbit", "burst", f"{mbit * 0.64:g}kb", "limit", "512mb"]
        for into, address in zip(([], enter), ADDRESSES, strict=True):
            call(*into, "ip", "address", "add", f"{address}/24", "dev", INTERFACE)
            call(*into, "ip", "link", "set", "lo", "up")
            call(*into, "ip", "link", "set", INTERFACE, "up")
            call(*into, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *shape)
        yield enter
    finally:
        holder.kill()
        holder.wait()


def end_with_parent() -> None:
    """Make this process end when its parent does, however that is, and leave Ctrl-C to the parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run(command: Sequence[str], world: int, other: Sequence[str]) -> int:
    """Start `world` ranks of a command, the second half on the server that `other` enters; return 0 if all end well."""
    ranks: list[subprocess.Popen[bytes]] = []
    variables = {
        "WORLD_SIZE": str(world), "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": INTERFACE,
        "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        # Names of addresses, which nobody knows here.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    try:
        for rank in range(world):
            into = other if rank >= world // 2 else []
            environment = {**os.environ, **variables, "RANK": str(rank)}
            ranks.append(subprocess.Popen([*into, *command], env=environment, preexec_fn=end_with_parent))
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(0.1)
        return max(abs(rank.poll() or 0) for rank in ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def enter_namespace() -> None:
    """Become the same program in a network namespace of its own, once: as root, else as root of a user namespace."""
    if INSIDE in os.environ:
        return
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise NotPermitted(f"no {', '.join(missing)} on this machine: install iproute2 and util-linux")
    os.environ[INSIDE] = "1"
    for how in ("-n", "-rn"):
        if subprocess.run(["unshare", how, "true"], capture_output=True, check=False).returncode == 0:
            os.execvp("unshare", ["unshare", how, sys.executable, *sys.argv])
    raise NotPermitted("neither `unshare -n` nor `unshare -rn` is permitted: run it as root")
