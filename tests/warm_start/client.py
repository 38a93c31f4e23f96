"""The part in a process that starts others: makes `subprocess` ask a zygote first."""

from __future__ import annotations

import contextlib
import ctypes
import marshal
import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

# Variables whose values are read when Python starts or a library is imported. scikit-learn itself sets two KMP_
# variables in every process that imports it, also in a zygote.
READ_BY_IMPORTS = re.compile(
    r"PYTHON(?!PATH$|UNBUFFERED$)|LD_|MALLOC_|GLIBC_|OMP_|KMP_(?!DUPLICATE_LIB_OK$|INIT_AT_FORK$)|MKL_|OPENBLAS_"
    r"|KERAS_|XLA_FLAGS|TF_ENABLE_ONEDNN|LANG|LC_"
)
_DEFAULTS = {"TF_ENABLE_ONEDNN_OPTS": "1"}  # the same whether it is set or not
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)
_ROOM = "_" * 16384
_REPOSITORY = Path(__file__).resolve().parents[2]
_real_fork_exec = subprocess._fork_exec


@dataclass(frozen=True)
class PackedFunction:
    """A function in a form from which another process with the same code can rebuild it."""

    module: str
    name: str
    code: bytes
    closure: tuple[Any, ...]


@dataclass(frozen=True)
class Start:
    """What a fork is to become. Its descriptors are sent separately: standard input, output, error, the pipe for errors
    of the start, then those of `kept`."""

    arguments: list[str]
    environment: dict[bytes, bytes]
    folder: str
    kept: tuple[int, ...]
    parent: int
    group: int
    ignored: tuple[int, ...]  # signals
    cores: frozenset[int]
    own_session: bool
    process_group: int
    umask: int
    prepare: PackedFunction | None


class Zygote:
    """The connection to a zygote."""

    def __init__(self, channel: socket.socket, variables: dict[str, str]):
        self._channel, self.variables, self._lock = channel, variables, threading.Lock()

    def start(self, start: Start, descriptors: Sequence[int]) -> int:
        """Starts a child of this process. Returns its process id."""
        data = pickle.dumps(start)
        with self._lock:
            # the fork's first parent ends at once; then the nearest ancestor that is a subreaper adopts the fork
            _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._channel, [struct.pack("I", len(data))], descriptors)
                self._channel.sendall(data)
                answer = self._channel.recv(4, socket.MSG_WAITALL)
            finally:
                _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if len(answer) < 4:
            raise OSError("the zygote of the tests has ended")
        return struct.unpack("I", answer)[0]


def read_by_imports(environment: dict[str, str]) -> dict[str, str]:
    chosen = {name: value for name, value in environment.items() if READ_BY_IMPORTS.match(name)}
    return {name: value for name, value in chosen.items() if _DEFAULTS.get(name) != value}


def packed(function: Callable) -> PackedFunction | None:
    """Returns the function packed; None if it cannot be packed."""
    if not isinstance(function, FunctionType) or function.__defaults__:
        return None
    closure = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return PackedFunction(function.__module__, function.__name__, marshal.dumps(function.__code__), closure)


def can_be_warm(arguments: Sequence[str]) -> bool:
    """Whether the command is this Python with a module of tfdist or the tests, with Sphinx, which imports tfdist to
    document it, or with a script.
    """
    if len(arguments) < 2 or arguments[0] != sys.executable:
        return False
    if arguments[1] == "-m":
        return len(arguments) > 2 and (arguments[2].startswith(("tfdist.", "tests.")) or arguments[2] == "sphinx")
    return arguments[1].endswith(".py")


def _warm_start(zygote_for: Callable[[dict[str, str]], Zygote], passed: tuple) -> int | None:
    """Returns the id of the new process; None if it must be a real one. Takes the arguments of `_fork_exec`."""
    (
        arguments,
        programs,
        close_fds,
        kept,
        folder,
        environment,
        stdin,
        _,
        _,
        stdout,
        _,
        stderr,
        _,
        errors,
        restore_signals,
        own_session,
        process_group,
        *who,
        umask,
        prepare,
        _,
    ) = passed
    arguments = [os.fsdecode(argument) for argument in arguments]
    as_usual = close_fds and restore_signals and who in ([None, None, None], [-1, None, -1])
    if not (as_usual and can_be_warm(arguments) and programs == (os.fsencode(sys.executable),)):
        return None
    variables = dict(os.environb)
    if environment is not None:
        variables = dict(pair.split(b"=", 1) for pair in environment)
    decoded = {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()}
    zygote = zygote_for(decoded)
    function = packed(prepare) if prepare else None
    if zygote.variables != read_by_imports(decoded) or (prepare and not function):
        return None
    others = tuple(descriptor for descriptor in kept if descriptor != errors)
    start = Start(
        arguments,
        variables,
        os.path.join(os.getcwd(), os.fsdecode(folder or "")),
        others,
        os.getpid(),
        os.getpgrp(),
        tuple(number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN),
        frozenset(os.sched_getaffinity(0)),
        own_session,
        process_group,
        umask,
        function,
    )
    standard = [given if given >= 0 else own for own, given in enumerate((stdin, stdout, stderr))]
    return zygote.start(start, [*standard, errors, *others])


def install(zygote_for: Callable[[dict[str, str]], Zygote]) -> None:
    """Makes `subprocess` ask for forks from now on. `zygote_for`: environment -> zygote."""

    def fork_exec(*passed):
        number = _warm_start(zygote_for, passed)
        return _real_fork_exec(*passed) if number is None else number

    subprocess._fork_exec = fork_exec


_own: Zygote | None = None  # of this process; ends with it, since then nobody holds the other end of its socket


def _started(environment: dict[str, str]) -> Zygote:
    """Returns the zygote of this process. It has the variables of the first process that needs it."""
    global _own
    if _own is None:
        ours, its = socket.socketpair()
        path = os.pathsep.join([str(_REPOSITORY), environment.get("PYTHONPATH", "")])
        # the last argument and variable reserve space for those of its forks (forked.py)
        command = [sys.executable, "-m", "tests.warm_start.zygote", str(its.fileno()), _ROOM]
        with its, _real_start():
            subprocess.Popen(
                command,
                env={"TF_CPP_MIN_LOG_LEVEL": "2", **environment, "PYTHONPATH": path, "ROOM": _ROOM},
                cwd=_REPOSITORY,
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
            )
        if ours.recv(1) != b"!":
            raise OSError("the zygote of the tests could not start: see what it has said")
        _own = Zygote(ours, read_by_imports(environment))
    return _own


@contextlib.contextmanager
def _real_start() -> Iterator[None]:
    before, subprocess._fork_exec = subprocess._fork_exec, _real_fork_exec
    try:
        yield
    finally:
        subprocess._fork_exec = before


@contextlib.contextmanager
def warm_start() -> Iterator[None]:
    """Context manager in which this process starts forks of a zygote, which itself starts when first needed."""
    before = subprocess._fork_exec
    install(_started)
    try:
        yield
    finally:
        subprocess._fork_exec = before


real_start = _real_start
