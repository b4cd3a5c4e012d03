"""Fast starts of ranks: forks of a process that has imported torch, and has computed nothing.

`warm_python` forks this process after the imports of a rank, while it has one thread. It yields the words of a command
that replaces Python. That command hands its arguments and environment to a fork, passes signals on, and ends as the
fork does. If the command is killed, so is the fork.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import torch
import torch._dynamo  # The first optimizer imports it, which takes seconds.

import superscaler.comm.distributed
import superscaler.launch.watch
import superscaler.train.loop  # noqa: F401
from superscaler.interrupt import TemporaryFolder, end_with_parent
from superscaler.launch.client import FOLLOW

# It imports nothing but this, to start in a few hundredths of a second.
_CLIENT = """import json, os, resource, signal, socket, struct, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
asked = json.dumps([sys.argv[1:], dict(os.environ)]).encode()
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
def ask():
    server.sendall(struct.pack("<q", len(asked)) + asked)
"""
_NUMBER = struct.Struct("<q")
_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
# Seconds between two looks for ranks that have ended.
_LOOK = 0.05


@contextmanager
def warm_python() -> Iterator[Sequence[str]]:
    """Yield the words that start a program as a rank: as a fork if that is safe, else in a new Python."""
    with TemporaryFolder() as folder, socket.socket(socket.AF_UNIX) as server:
        if not _may_fork() or not _listens(server, f"{folder}/socket"):
            yield (sys.executable,)
            return
        client = Path(folder) / "rank.py"
        client.write_text(_CLIENT.format(address=server.getsockname()) + FOLLOW)
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            _serve(server)
        server.close()
        try:
            yield sys.executable, "-IS", str(client)
        finally:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _may_fork() -> bool:
    """Return whether a fork of this process can run torch: it has no other thread, and there is no GPU."""
    return sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1 and torch.cuda.device_count() == 0


def _listens(server: socket.socket, address: str) -> bool:
    try:
        server.bind(address)
        server.listen(1024)
    except OSError:
        # The path may be too long for a socket.
        return False
    return True


def _serve(server: socket.socket) -> NoReturn:
    """Fork for each client, and send it the exit code of its fork, until this process is killed."""
    # The launcher, or its terminal, sends signals to the ranks; they ignore those that it ignores (nohup).
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    taken = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    end_with_parent()
    gc.freeze()
    clients: dict[int, socket.socket] = {}
    while True:
        for ready in select.select([server, *clients.values()], [], [], _LOOK)[0]:
            if ready is server:
                client = server.accept()[0]
                words, environment = _read(client)
                process = os.fork()
                if process == 0:
                    for file in (server, client, *clients.values()):
                        file.close()
                    _run(words, environment, taken)
                clients[process] = client
                with suppress(OSError):
                    client.sendall(_NUMBER.pack(process))
            else:
                _end([process for process, client in clients.items() if client is ready], clients)
        _report(clients)


def _end(processes: Sequence[int], clients: dict[int, socket.socket]) -> None:
    """Kill forks whose clients are gone."""
    for process in processes:
        clients.pop(process).close()
        os.kill(process, signal.SIGKILL)


def _report(clients: dict[int, socket.socket]) -> None:
    """Send the exit codes of forks that have ended."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if client := clients.pop(found[0], None):
                with client, suppress(OSError):
                    client.sendall(_NUMBER.pack(os.waitstatus_to_exitcode(found[1])))


def _read(client: socket.socket) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment of a client."""
    with client.makefile("rb") as asked:
        (size,) = _NUMBER.unpack(asked.read(_NUMBER.size))
        words, environment = json.loads(asked.read(size))
        return words, environment


def _run(words: Sequence[str], environment: Mapping[str, str], taken: Iterable[signal.Signals]) -> NoReturn:
    """Run a program as a new Python would, and end."""
    code = 1
    try:
        os.setsid()
        for number in taken:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        sys.unraisablehook = sys.__unraisablehook__
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or 1))
        sys.argv, sys.path[0] = [*words], str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        # As Python ends a program: whatever it raised is printed.
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        os._exit(code)
