"""Python processes that need not import PyTorch: each is forked from one that has, and then runs its script.

The import is most of what a rank of a small job costs (two to four seconds of a core each). What a launcher starts is
forked, too, where it starts `QUICK_PYTHON` in place of Python; few tests have to see Python itself start. As a script,
this file is the process that forks.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from ports import free_port

PRELOADED = (
    "torch",
    "torch._dynamo.utils",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.profiler",
    "torch.utils.data",
)
"""Nothing of ours: what it notes of its process as it is imported has to be true of the rank."""

COMPILER = ("torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.codegen.cpp", "torch.utils.cpp_extension")
"""What torch.compile imports at its first graph."""
ONE_COMPILER = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""For ranks that compile: otherwise each starts processes that compile for it, and imports PyTorch in them."""

NAMESPACES = {"user": 0x10000000, "net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}
"""CLONE_NEW... of <linux/sched.h>; the user's first, which gives the right to enter the others."""

QUICK_PYTHON = str(Path(__file__).with_name("quick_python"))
"""For `python`, with `quick()` in its environment."""

Stream = int | IO[Any]


class ForkServer:
    """The process that forks; started with the first rank, and gone with this process."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one_thread = ONE_COMPILER | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._folder = tempfile.TemporaryDirectory(prefix="forks")
        self.path = f"{self._folder.name}/socket"
        command = [sys.executable, __file__, str(theirs.fileno()), self.path]
        self._process = subprocess.Popen(command, env=os.environ | one_thread, pass_fds=[theirs.fileno()])
        theirs.close()
        self._ended: dict[int, int] = {}

    def fork(self, request: Mapping[str, Any], streams: Sequence[int]) -> int:
        """Starts a process with these standard streams; its id."""
        socket.send_fds(self._socket, [json.dumps(request).encode()], list(streams))
        while True:
            if "pid" in (reply := self._reply()):
                self._ended.pop(reply["pid"], None)  # of an earlier process that had this number
                return int(reply["pid"])

    def exit_code(self, pid: int, timeout_s: float | None) -> int | None:
        """How one ended, as `subprocess` says it; None if it still runs after so long."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while pid not in self._ended:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                return None
            self._reply()
        return self._ended[pid]

    def _reply(self) -> dict[str, int]:
        found = self._socket.recv(1 << 16)
        if not found:
            raise ChildProcessError("the process that forks ranks has ended")
        reply: dict[str, int] = json.loads(found)
        if "ended" in reply:
            self._ended[reply["ended"]] = reply["code"]
        return reply


def quick() -> dict[str, str]:
    """The environment in which a launcher's `QUICK_PYTHON` finds who forks; torchrun starts its ranks so, too."""
    return {"QUICK_PYTHON": server().path, "PYTHON_EXEC": QUICK_PYTHON}


_server: ForkServer | None = None


def server() -> ForkServer:
    """The one of this process; a test that says where temporary files go has it started before."""
    global _server  # noqa: PLW0603 - one for all tests of this process
    if _server is None:
        _server = ForkServer()
    return _server


class ForkedPython:
    """A `subprocess.Popen` of `python SCRIPT ARGUMENTS`, as far as tests use one.

    `stdin` is the null device if not given; `machine` is the id of a process whose namespaces it enters; `imports` are
    modules of PyTorch's that most scripts do without: from the first that asks for one on, it is there in all.
    """

    def __init__(
        self,
        script: Path | str,
        arguments: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        stdin: Stream | None = None,
        stdout: Stream | None = None,
        stderr: Stream | None = None,
        text: bool = True,
        machine: int | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        self.args = [str(script), *arguments]
        self.returncode: int | None = None
        self.stdin, source = self._pipe(stdin, subprocess.DEVNULL, "w" if text else "wb")
        self.stdout, out = self._pipe(stdout, 1, "r" if text else "rb")
        self.stderr, error = self._pipe(stderr, 2, "r" if text else "rb")
        request = {
            "argv": self.args,
            "environment": dict(os.environ if env is None else env),
            "folder": str(cwd or Path.cwd()),
            "machine": machine,
            "imports": list(imports),
        }
        self.pid = server().fork(request, [source, out, out if stderr == subprocess.STDOUT else error])
        for end in (source, out, error):
            os.close(end)

    @staticmethod
    def _pipe(stream: Stream | None, usual: int, mode: str) -> tuple[IO[Any] | None, int]:
        """(our end, theirs, which is to be closed)"""
        if stream == subprocess.PIPE:
            reader, writer = os.pipe()
            ours, theirs = (writer, reader) if mode.startswith("w") else (reader, writer)
            return os.fdopen(ours, mode), theirs
        if stream is None or stream == subprocess.STDOUT:
            stream = usual
        if stream == subprocess.DEVNULL:
            return None, os.open(os.devnull, os.O_RDWR)
        return None, os.dup(stream if isinstance(stream, int) else stream.fileno())

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: if that takes longer.
        """
        if self._wait(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def _wait(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            self.returncode = server().exit_code(self.pid, timeout_s)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing, for one that has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)


def run_ranks(
    script: Path | str,
    arguments: Sequence[str],
    num_ranks: int,
    *,
    cwd: Path | str | None = None,
    imports: Sequence[str] = (),
) -> list[str]:
    """Runs a script on ranks of one machine, with what torchrun would tell them, to the end; what each wrote.

    Raises:
        subprocess.CalledProcessError: if a rank fails; with the last words of that rank.
    """
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    world |= ONE_COMPILER | {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    ranks, logs = [], []
    with contextlib.ExitStack() as stack:
        for rank in range(num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            logs.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            ranks.append(
                ForkedPython(
                    script,
                    arguments,
                    env=os.environ | world | own,
                    cwd=cwd,
                    stdout=logs[-1],
                    stderr=logs[-1],
                    imports=imports,
                )
            )
        try:
            while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
                time.sleep(0.02)
        finally:
            for rank in ranks:
                rank.kill()
        written = []
        for code, log in zip(codes, logs, strict=True):
            log.seek(0)
            written.append(log.read())
            if code:
                raise subprocess.CalledProcessError(code, [str(script), *arguments], written[-1][-12_000:])
        return written


def _serve(connection: socket.socket, listener: socket.socket) -> list[str]:  # noqa: PLR0912 - one loop of events
    """Forks until the other side has gone; returns in each child, with its script and arguments.

    Each process that a launcher started has a connection of its own: the forked one ends with it.
    """
    ended, wake = socket.socketpair()
    for end in (ended, wake):
        end.setblocking(False)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    asked_by: dict[int, socket.socket] = {}
    stands_for: dict[socket.socket, int | None] = {}
    while True:
        ready, _, _ = select.select([connection, ended, listener, *stands_for], [], [])
        if ended in ready:
            ended.recv(1 << 12)
        while asked_by:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            asker = asked_by.pop(pid)
            with contextlib.suppress(OSError):
                _say(asker, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})
            if stands_for.pop(asker, None) is not None:
                asker.close()
        if listener in ready:
            stands_for[listener.accept()[0]] = None
        for asker in [one for one in ready if one is connection or one in stands_for]:
            words, streams, _, _ = socket.recv_fds(asker, 1 << 20, 3)
            if not words and asker is connection:
                for pid in asked_by:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            if not words:  # whom it stood for was killed
                pid = stands_for.pop(asker) or 0
                if pid in asked_by:
                    os.kill(pid, signal.SIGKILL)
                continue
            request = json.loads(words)
            _import(request["imports"])
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, before)
                for end in (ended, wake, connection, listener, *stands_for):
                    end.close()
                return _become(request, streams)
            asked_by[pid] = asker
            if asker in stands_for:
                stands_for[asker] = pid
            for stream in streams:
                os.close(stream)
            _say(asker, {"pid": pid})


def _say(connection: socket.socket, reply: dict[str, int]) -> None:
    connection.sendall(json.dumps(reply).encode())


def _become(request: dict[str, Any], streams: Sequence[int]) -> list[str]:
    """Makes this process what was asked for; its script and arguments."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["machine"] is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        for name, flag in NAMESPACES.items():
            theirs, own = (f"/proc/{pid}/ns/{name}" for pid in (request["machine"], "self"))
            if Path(theirs).samefile(own):  # of root there is no other user namespace
                continue
            namespace = os.open(theirs, os.O_RDONLY)
            if libc.setns(namespace, flag):
                raise OSError(ctypes.get_errno(), f"cannot enter {theirs}")
            os.close(namespace)
    os.chdir(request["folder"])
    if request.get("starts"):
        _start()
    return list(request["argv"])


def _start() -> None:
    """What Python does as it starts, as far as the environment asks for it."""
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        import_module("sitecustomize")
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout = io.TextIOWrapper(open(1, "wb", 0, closefd=False), write_through=True)  # noqa: SIM115
    # Had it waited for PyTorch, it would have met this module first.
    distributed, groups = sys.modules["torch.distributed"], sys.modules["torch.distributed.distributed_c10d"]
    distributed.init_process_group = groups.init_process_group  # type: ignore[attr-defined]


def _run(arguments: list[str]) -> int:
    """The exit code of `python ARGUMENTS`, a script's or `-m MODULE`'s, after what Python does at its end.

    But objects are not taken apart, which would write to every page of PyTorch's that is shared: a second of a core.
    """
    code = 1
    try:
        while arguments[0] == "-u":
            arguments.pop(0)
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def _import(names: Sequence[str]) -> None:
    """Imports what is not there yet, for good."""
    if all(name in sys.modules for name in names):
        return
    gc.disable()
    for name in names:
        import_module(name)
    threads = [entry.name for entry in Path("/proc/self/task").iterdir()]
    assert len(threads) == 1, f"{len(threads)} threads: a child would lack all but one"
    gc.collect()
    gc.freeze()  # a collection in a rank leaves these objects, and so the pages that it shares with us, alone
    gc.enable()


if __name__ == "__main__":
    _import((*PRELOADED, *os.environ.get("FORKED_PYTHON_PRELOADS", "").split()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as where:
        where.bind(sys.argv[2])
        where.listen(64)
        arguments = _serve(socket.socket(fileno=int(sys.argv[1])), where)
    os._exit(_run(arguments))
