"""Arrays that a process on the same host can read in place, instead of receiving a copy.

An array lives in an anonymous file (memfd_create) that the other process opens through /proc/PID/fd: there is no name
that could be left behind, however the two processes end. Processes that cannot do this (other hosts, other PID
namespaces, other users, systems other than Linux) find out when they try to read each other's token.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import secrets
import struct
import weakref
from collections.abc import Collection
from typing import Any, BinaryIO

import numpy as np

_OFFER = struct.Struct("!QQ16s")  # PID, descriptor, token
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (*[ctypes.c_void_p, ctypes.c_size_t], *[ctypes.c_int] * 3, ctypes.c_long)
_FAILED = ctypes.c_void_p(-1).value
NOT_SHARED, KNOWN = 0, -1  # special values of a serial number and of a descriptor


class SharedArrays:
    """Arrays of this process that others can read. Each is identified by a serial number.

    Attributes: readers, the ranks that can read them.
    """

    def __init__(self) -> None:
        self.readers: frozenset[int] = frozenset()
        self._token = secrets.token_bytes(16)
        self._readers_of: dict[int, set[int]] = {}  # serial -> the ranks that have the array open
        self._descriptors: dict[int, int] = {}  # serial -> descriptor, until all ranks have the array open
        self._serials: dict[int, int] = {}  # address -> serial
        self._numbers = itertools.count(NOT_SHARED + 1)

    def offer(self) -> bytes:
        """Returns the token by which a process finds out whether it can read these arrays.

        Call `withdraw` once all processes have found out.
        """
        descriptor = 0
        with contextlib.suppress(AttributeError, OSError):  # not Linux; no memory
            descriptor = os.memfd_create("tfdist-offer")
            os.write(descriptor, self._token)
        self._descriptors[NOT_SHARED] = descriptor
        return _OFFER.pack(os.getpid(), descriptor, self._token)

    def withdraw(self) -> None:
        """Ends the offer, once all processes have checked it."""
        self._close(NOT_SHARED)

    def empty(self, length: int) -> np.ndarray:
        """A zeroed float32 [length], on a page boundary.

        Keep it as long as this object, which identifies the array by its address.
        """
        descriptor = os.memfd_create("tfdist-array")
        os.ftruncate(descriptor, max(4 * length, 4))
        array = _mapped(descriptor, length, mmap.PROT_READ | mmap.PROT_WRITE)
        serial = next(self._numbers)
        self._serials[array.ctypes.data], self._descriptors[serial] = serial, descriptor
        return array

    def where(self, array: np.ndarray) -> tuple[int, int]:
        """(serial number or NOT_SHARED, descriptor or KNOWN) of an array made by `empty`."""
        serial = self._serials.get(array.ctypes.data, NOT_SHARED)
        return serial, self._descriptors.get(serial, KNOWN)

    def has_been_read(self, serial: int, by: Collection[int]) -> None:
        """Records that these ranks keep the array open from now on. Once all readers do, its descriptor is closed, as a
        process may have only 1024."""
        if serial in self._descriptors:
            known = self._readers_of.setdefault(serial, set())
            known |= set(by)
            if known >= self.readers:
                self._close(serial)
                del self._readers_of[serial]

    def _close(self, serial: int) -> None:
        descriptor = self._descriptors.pop(serial, 0)
        if descriptor:
            os.close(descriptor)


class OthersArrays:
    """The arrays of the process that made `offer`, read from here."""

    def __init__(self, offer: bytes):
        self._pid, descriptor, token = _OFFER.unpack(offer)
        self._open: dict[int, np.ndarray] = {}
        self.readable = False
        with contextlib.suppress(OSError), self._file(descriptor) as file:
            self.readable = file.read(len(token) + 1) == token

    def _file(self, descriptor: int) -> BinaryIO:
        """Opens a file. Raises OSError unless it is a tfdist array: opening others may block, or have side effects."""
        path = f"/proc/{self._pid}/fd/{descriptor}"
        if not os.readlink(path).startswith("/memfd:tfdist-"):
            raise OSError(f"{path} is not an array of tfdist")
        return open(path, "rb")

    def get(self, serial: int, descriptor: int, length: int) -> np.ndarray:
        """Returns the array, read-only float32 [length]. Raises OSError if its process has ended."""
        if serial not in self._open:
            with self._file(descriptor) as file:
                if os.fstat(file.fileno()).st_size < 4 * length:
                    raise OSError("it is shorter than it should be")
                self._open[serial] = _mapped(file.fileno(), length, mmap.PROT_READ)
        return self._open[serial]


def _mapped(descriptor: int, length: int, protection: int) -> np.ndarray:
    """Maps float32 [length] from the memory behind a descriptor, until nobody refers to it. Raises OSError.

    Does not use Python's mmap, which keeps a descriptor of its own: eight workers with a hundred buckets would need
    thousands of descriptors.
    """
    size = max(4 * length, 4)
    address = _LIBC.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory: Any = (ctypes.c_byte * size).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, ctypes.c_void_p(address), ctypes.c_size_t(size)).atexit = False
    array = np.frombuffer(memory, np.float32, length)
    array.flags.writeable = bool(protection & mmap.PROT_WRITE)
    return array
