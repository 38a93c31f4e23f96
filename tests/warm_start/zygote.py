"""python -m tests.warm_start.zygote DESCRIPTOR: imports all that a worker imports, then forks on request of whoever
holds the other end of that socket, until nobody holds it."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import pkgutil
import signal
import socket
import struct
import sys
import threading
from typing import NoReturn

from tests.warm_start import ZYGOTE, forked
from tests.warm_start.client import Start, Zygote, read_by_imports

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def import_all() -> None:
    importlib.import_module("tfdist.control.versions").import_keras()
    run = importlib.import_module("tfdist.run")
    for name in (*(f"run.{module.name}" for module in pkgutil.iter_modules(run.__path__)), "flags", "keras_fit.api"):
        importlib.import_module(f"tfdist.{name}")
    # modules that a worker imports late, if it needs them
    late = ("matplotlib.backends.backend_agg", "matplotlib.pyplot", "tensorboard.summary.writer.event_file_writer")
    for name in ("sklearn.datasets", "fsspec", "s3fs", "tensorboard.plugins.hparams.api", *late):
        importlib.import_module(name)


def serve(channel: socket.socket) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the other processes of the group
    forked.show([*sys.orig_argv[:3]], {}, ZYGOTE)
    while True:
        head, descriptors, _, _ = socket.recv_fds(channel, 4, 250)
        if not head:
            os._exit(0)
        data = b""
        while len(data) < struct.unpack("I", head)[0]:
            data += channel.recv(2**16)
        start = pickle.loads(data)
        channel.sendall(struct.pack("I", _fork(start, descriptors)))
        for descriptor in descriptors:
            os.close(descriptor)


def _fork(start: Start, descriptors: list[int]) -> int:
    """Returns the process id of a fork that is no longer our child: its parent has ended."""
    tell, told = os.pipe()
    first = os.fork()
    if first == 0:
        second = os.fork()
        if second == 0:
            os.close(tell)
            forked.become(start, descriptors, beside)
        os.write(told, struct.pack("I", second))
        os._exit(0)
    os.close(told)
    number = struct.unpack("I", os.read(tell, 4))[0]
    os.close(tell)
    os.waitpid(first, 0)
    return number


def beside(environment: dict[str, str]) -> Zygote:
    """Makes a zygote for this process, which has not run a line of its program yet."""
    ours, its = socket.socketpair()
    parent = os.getpid()
    if os.fork() == 0:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        forked.keep_only({its.fileno()}, os.open(os.devnull, os.O_RDWR))
        serve(its)
    its.close()
    return Zygote(ours, read_by_imports(environment))


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    import_all()
    if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
        sys.exit("tests/warm_start: importing has started threads; a fork would lose them")
    forked.remember()
    gc.collect()
    gc.freeze()
    channel.sendall(b"!")
    serve(channel)


if __name__ == "__main__":
    main()
