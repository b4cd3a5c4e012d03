"""Python processes that start at once: forks of one that has imported what takes seconds.

`quick_python(folder)` starts that one, and returns a program that takes the place of `sys.executable`: it hands its
arguments, environment, files, limits and ignored signals to a fork, passes signals on, and ends as the fork does. Where
it is killed the fork is, too. What it cannot show is how Python itself starts: tests of imports or of hashes take the
real one.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import multiprocessing
import os
import resource
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
import warnings
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
# Entries of the cache of a run: a user's cache has 64, and what one process captured was gone when another needed it.
KEPT = 10_000
# Imports nothing but this: it must start in a few hundredths of a second. The other end sends the number of its fork,
# and how that ended: an exit code, or minus a signal. Nothing comes where the other end was killed.
_CLIENT = """#!{python} -IS
import os, resource, signal, socket, struct, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
signals = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT
ignored = [int(number) for number in signals if signal.getsignal(number) == signal.SIG_IGN]
files = [0, 1, 2]
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        files += [number] * (number > 2 and os.get_inheritable(number))
    except OSError:
        pass  # That of the list itself.
asked = repr([sys.argv, dict(os.environ), os.getcwd(), limits, os.getpid(), files, ignored]).encode()
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
socket.send_fds(server, [struct.pack("<Q", len(asked))], files)
server.sendall(asked)
(fork,) = struct.unpack("<q", server.recv(8))
def hand_on(number, frame):
    try:
        os.kill(fork, number)
    except ProcessLookupError:
        pass  # It has ended already, and its exit code is on its way.
for number in {{*signals}} - {{*ignored}}:
    signal.signal(number, hand_on)
signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
answer = server.recv(8)
code = struct.unpack("<q", answer)[0] if answer else -signal.SIGKILL
if code < 0:
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
_SIZE = struct.Struct("<Q")
# The most files that a process is given, and a number that none of them has.
_FILES, _HIGH = 64, 512


def quick_python(folder: Path, is_warm: bool = True) -> Path:
    """Start the process that forks; it ends with this one. Returns the program, which waits until that is ready.

    `is_warm`: it has done what a command does, and not imported torch alone.
    """
    address, program = str(folder / "socket"), folder / "python"
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen(64)
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    # Another seed of hashes than this process has.
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": seed}
    # Larger pages: a fork copies a shorter table of them.
    own["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    environment = {**os.environ, **own}
    command = [sys.executable, __file__, str(server.fileno()), str(os.getpid()), str(int(is_warm))]
    process = subprocess.Popen(command, pass_fds=[server.fileno()], env=environment, stdin=subprocess.DEVNULL)
    atexit.register(lambda: (process.kill(), process.wait()))
    server.close()
    program.write_text(_CLIENT.format(python=sys.executable, address=address))
    program.chmod(0o700)
    return program


def quick_launches() -> None:
    """Let torchrun's agent name no methods in its events, of which nobody reads the names. It looks at all frames for
    each, and for a frame without a file at all modules: half a second a launch in a worker, and more than one later on.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda depth=2: ""


def serve(server: socket.socket, parent: int, is_warm: bool) -> NoReturn:
    """Fork for whoever asks, until the process that started this one has ended."""
    import torch  # noqa: F401

    if is_warm:
        _warm()
    base = [p for p in sys.path if p not in (*_python_path(), str(Path(__file__).parent))]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    # At its end a fork would take each operator of torch off its table, which copies more memory than a small command.
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False
    server.settimeout(1.0)
    while os.getppid() == parent:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            server.close()
            _tend(connection, base)
        connection.close()
    os._exit(0)


def _warm() -> None:
    """Import what a command does, by doing it."""
    import torch
    import torch.distributed.launcher.api
    from tqdm import tqdm

    import superscaler as ss
    import superscaler.cli.compile
    import superscaler.train.launch
    import superscaler.train.loop
    from superscaler.models import build
    from superscaler.store import cache
    from tests.helpers.exports import quick_exports

    quick_exports()
    cache.ENTRIES = KEPT
    # Its thread would not be in a fork.
    tqdm.monitor_interval = 0
    # A build with CUDA makes eight devices up here, and autograd would start a thread for each of them.
    torch._C._ensureCUDADeviceGuardSet = lambda: None
    built = build("gpt2:size=tiny")
    graph = ss.capture(built.module, built.args, built.kwargs, torch.optim.AdamW(built.module.parameters()))
    ss.compile(graph, "data_parallel", "local:2")
    assert len(os.listdir("/proc/self/task")) == 1


def _tend(connection: socket.socket, base: list[str]) -> NoReturn:
    """Fork once more, and tell how that one ends."""
    connection.setblocking(True)
    head, files, _, _ = socket.recv_fds(connection, _SIZE.size, _FILES)
    (left,) = _SIZE.unpack(head)
    asked = b""
    while len(asked) < left:
        asked += connection.recv(left - len(asked))
    fork = os.fork()
    if fork == 0:
        _be(connection, files, eval(asked), base)
    for file in files:
        os.close(file)
    # Nobody may be there any more: then the fork was killed, too.
    with suppress(OSError):
        connection.sendall(struct.pack("<q", fork))
    _, status = os.waitpid(fork, 0)
    with suppress(OSError):
        connection.sendall(struct.pack("<q", os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _be(connection: socket.socket, files: list[int], asked: list[Any], base: list[str]) -> NoReturn:
    """Do what Python does with arguments, and end."""
    (program, *arguments), environment, folder, limits, client, numbers, ignored = asked
    # Out of the way of the numbers that the client has.
    own = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    connection.close()
    connection = socket.socket(fileno=own)
    # Where the client is killed, this process is.
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, 10, signal.SIGKILL)  # F_SETSIG
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(numbers, moved, strict=True):
        os.dup2(file, number)
        os.close(file)
    _join(client)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.executable = program
    multiprocessing.set_executable(program)
    # What its parent is asks who watches over it.
    os.getppid = lambda: _parent_of(client)
    code = _end(lambda: _run(arguments, base))
    os._exit(code)


def _join(process: int) -> None:
    """Enter the network, the names and the files of another process, where it has its own (dist/test_servers.py)."""
    for kind in ("net", "uts", "mnt"):
        with open(f"/proc/{process}/ns/{kind}") as theirs, open(f"/proc/self/ns/{kind}") as own:
            if not os.path.sameopenfile(theirs.fileno(), own.fileno()) and ctypes.CDLL(None).setns(theirs.fileno(), 0):
                raise OSError(f"no {kind} of process {process}")


def _parent_of(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 1


def _run(arguments: list[str], base: list[str]) -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    if arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        arguments = arguments[2:]
    arguments = [a for n, a in enumerate(arguments) if n or a not in ("-u", "-B", "-IS")]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    how = arguments.pop(0) if arguments[0] in ("-c", "-m") else ""
    what = arguments[0]
    sys.argv = ["-c" if how == "-c" else what, *arguments[1:]]
    first = "" if how == "-c" else os.getcwd() if how else str(Path(what).resolve().parent)
    sys.path[:] = [first, *_python_path(), *base]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif how == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)
    else:
        runpy.run_path(what, run_name="__main__")


def _python_path() -> list[str]:
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]


def _end(work: Any) -> int:
    """Run something as all that a process does; return its exit code."""
    code: Any = 0
    try:
        work()
    except SystemExit as ended:
        code = ended.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        kind, error, trace = sys.exc_info()
        assert kind is not None
        sys.excepthook(kind, error, trace)  # type: ignore[arg-type]
        code = 130 if kind is KeyboardInterrupt else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    if code == 130:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return int(code or 0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3] == "1")
