"""Turns a fork of a zygote into what a new Python with its command would be."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import importlib
import io
import marshal
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from types import CellType, FunctionType, ModuleType
from typing import NoReturn, TextIO

from tests.warm_start import client
from tests.warm_start.client import PackedFunction, Start, Zygote

_PR_SET_NAME = 15
_LIBC = ctypes.CDLL(None)
_ALONE = ("tfdist.train", "tfdist.evaluate")  # start no other process of tfdist or the tests
_OWN_FILES = os.path.dirname(__file__)
_held: list[object] = []  # must not be freed: what such objects do then would happen in this process, too
_path: list[str] = []  # sys.path without what the command and PYTHONPATH add


def remember() -> None:
    """In the zygote, once: stores sys.path without what belongs to its own command."""
    added = {os.path.abspath(name) for name in os.environ.get("PYTHONPATH", "").split(os.pathsep)} | {os.getcwd()}
    _path[:] = [name for name in sys.path if os.path.abspath(name) not in added]


def become(start: Start, descriptors: list[int], beside: Callable[[dict[str, str]], Zygote]) -> NoReturn:
    code = 255
    try:
        while os.getppid() != start.parent:  # until the first parent has ended
            time.sleep(0.0002)
        errors = _take_descriptors(start.kept, descriptors)
        try:
            _settle(start)
        except BaseException as error:  # reported like _posixsubprocess does
            name, number = (
                ("OSError", f"{error.errno:x}") if isinstance(error, _FolderError) else ("SubprocessError", "0")
            )
            text = "noexec" if isinstance(error, _FolderError) else "Exception occurred in preexec_fn."
            os.write(errors, f"{name}:{number}:{text}".encode())
            os._exit(255)
        os.close(errors)
        _renew(start)
        code = _run(start, beside)
    finally:
        os._exit(code)


def keep_only(kept: Collection[int], standard: int) -> None:
    """Closes all descriptors but `kept`; standard input, output and error become `standard`."""
    for number in range(3):
        os.dup2(standard, number)
    for text in os.listdir("/proc/self/fd"):
        if int(text) > 2 and int(text) not in kept:
            try:
                os.close(int(text))
            except OSError:  # that of the listing
                continue


class _FolderError(OSError):
    pass


def _take_descriptors(kept: tuple[int, ...], descriptors: list[int]) -> int:
    """Moves the descriptors to their numbers and closes all others. Returns the pipe for errors."""
    above = max([100, *kept]) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]
    errors = moved[3]
    for number, descriptor in zip((0, 1, 2, *kept), (*moved[:3], *moved[4:]), strict=True):
        os.dup2(descriptor, number)
    for text in os.listdir("/proc/self/fd"):
        number = int(text)
        if number > 2 and number != errors and number not in kept:
            try:
                os.close(number)
            except OSError:  # that of the listing
                continue
    return errors


def _settle(start: Start) -> None:
    """Does what _posixsubprocess does between fork and exec."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is not None:
            signal.signal(number, signal.SIG_IGN if number in start.ignored else signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # Python always does this
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if signal.SIGINT not in start.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.sched_setaffinity(0, start.cores)
    try:
        os.chdir(start.folder)
    except OSError as error:
        raise _FolderError(error.errno, "") from None
    if start.umask >= 0:
        os.umask(start.umask)
    if start.own_session:
        os.setsid()
    elif start.process_group >= 0:
        os.setpgid(0, start.process_group)
    elif start.group != os.getpgrp():
        os.setpgid(0, start.group)
    if start.prepare:
        _unpacked(start.prepare)()


def _unpacked(function: PackedFunction) -> Callable[[], None]:
    names = importlib.import_module(function.module).__dict__
    cells = tuple(CellType(value) for value in function.closure)
    return FunctionType(marshal.loads(function.code), names, function.name, None, cells)


def _renew(start: Start) -> None:
    """Makes what Python makes at its start: environment, standard streams, random generators."""
    os.environb.clear()
    os.environb.update(start.environment)
    time.tzset()
    _held.extend([sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__])
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, encoding=sys.stdin.encoding, errors=sys.stdin.errors, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _stream(1, sys.stdout, at_once, at_lines=os.isatty(1))
    sys.stderr = sys.__stderr__ = _stream(2, sys.stderr, at_once, at_lines=True)
    if "numpy" in sys.modules:  # Python's own generator does this itself
        sys.modules["numpy"].random.seed()


def _stream(number: int, like: TextIO, at_once: bool, at_lines: bool) -> io.TextIOWrapper:
    raw = open(number, "wb", buffering=0 if at_once else -1, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        raw, encoding=like.encoding, errors=like.errors, line_buffering=at_lines and not at_once, write_through=at_once
    )


def _run(start: Start, beside: Callable[[dict[str, str]], Zygote]) -> int:
    """Runs the command as Python does, to the end of the interpreter. Returns the exit code."""
    if start.arguments[2 if start.arguments[1] == "-m" else 1] not in _ALONE:
        zygote = beside(dict(os.environ))
        client.install(lambda environment: zygote)
    show(start.arguments, start.environment)
    sys.orig_argv = list(start.arguments)
    _held.append(sys.modules["__main__"])
    sys.modules["__main__"] = ModuleType("__main__")
    sys.modules["__main__"].__dict__["__builtins__"] = sys.modules["builtins"]
    try:
        (_run_module if start.arguments[1] == "-m" else _run_script)(start.arguments)
        code = 0
    except SystemExit as end:
        code = _code_of(end)
    except BaseException as error:
        trace = error.__traceback__
        while trace and os.path.dirname(trace.tb_frame.f_code.co_filename) == _OWN_FILES:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            code = -signal.SIGINT
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code & 255


def show(arguments: list[str], environment: dict[bytes, bytes], name: str = "python") -> None:
    """Shows these in /proc/PID/cmdline, environ and comm, as far as they fit into the space of the zygote's own."""
    with open("/proc/self/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    places = [int(field) for field in fields[45:49]]  # from and to: arguments, environment
    variables = [name + b"=" + value for name, value in environment.items()]
    for begin, end, texts in ((*places[:2], map(os.fsencode, arguments)), (*places[2:], variables)):
        text = b"".join(text + b"\0" for text in texts)[: end - begin - 1]
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, text, len(text))
    _LIBC.prctl(_PR_SET_NAME, name.encode())


def _search_first(folder: str) -> None:
    given = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [folder, *(name for name in given.split(os.pathsep) if name), *_path]
    importlib.invalidate_caches()


def _run_module(arguments: list[str]) -> None:
    _search_first(os.getcwd())
    sys.argv = ["-m", *arguments[3:]]
    runpy._run_module_as_main(arguments[2])


def _run_script(arguments: list[str]) -> None:
    path = arguments[1]
    _search_first(os.path.dirname(os.path.realpath(path)))
    sys.argv = arguments[1:]
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    names = sys.modules["__main__"].__dict__
    names["__file__"] = path
    exec(code, names)


def _code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1
