"""A ring all-reduce over plain TCP for gradients on the CPU.

TensorFlow's own CPU collectives pass every tensor through gRPC, which costs three to four times what the same bytes cost
on a bare socket (scripts/bench_ring.py). Here each worker holds one connection to its right and one to its left
neighbour; gradients travel in buckets, in the order in which the backward pass makes them, while it goes on.

The algorithm is the bandwidth-optimal ring (Patarasu & Yuan 2009): each of the n ranks owns one of n chunks;
n - 1 steps pass partial sums around until every rank holds the complete sum of its own chunk, n - 1 more pass the
complete chunks on. Each rank sends and receives 2 (n - 1) / n of the data. A chunk is summed once, by ranks in ring
order, and then copied, so all ranks end with the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import math
import queue
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

MARK = "tfdist ring: "  # in the text of every error raised here, for runtime/errors.py
_HEADER = struct.Struct("!IIQ")  # site, bucket, bytes: checked, so that ranks can never mix up their gradients
_BLOCK = struct.Struct("!12sIQ")  # what a gathered block is, its stamp, its bytes: the first two must agree on all ranks
_SEND_BYTES = 1 << 20
_ALIGN = 16  # float32 elements: 64 bytes, what TensorFlow needs to take an array without a copy
_UNUSED_REFERENCES = 3  # the pool's list, the loop variable, and getrefcount's argument


class RingError(RuntimeError):
    """A neighbour is gone, silent, or doing something else."""


class Ring:
    """Connections to both neighbours, and the all-reduce over them.

    Args:
      exchange: hands this worker's endpoint "host:port" to all and returns all endpoints in rank order (a collective).
      host: name or address under which the other workers reach this one.
      timeout: seconds after which a neighbour that sends nothing is an error; 0: never.
      is_alive: asked about a neighbour's rank whenever that has been silent for `patience` seconds. A process that has
        ended closes its connections, but one that is stopped, or whose machine is gone, does not.
    """

    def __init__(self, rank: int, size: int, host: str, exchange: Callable[[str], Sequence[str]], timeout: float = 0.0,
                 is_alive: Callable[[int], bool] = lambda rank: True, patience: float = 10.0):
        self.rank, self.size, self.timeout, self.is_alive, self.patience = rank, size, timeout, is_alive, patience
        with socket.create_server(("", 0), backlog=1) as listener:
            endpoints = exchange(f"{host}:{listener.getsockname()[1]}")
            right_host, _, right_port = endpoints[(rank + 1) % size].rpartition(":")
            self.right = _connect(right_host, int(right_port), rank)
            self.left = _accept(listener, (rank - 1) % size)
        for connection in (self.right, self.left):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)
        self._scratch = np.empty(0, np.float32)
        self.waiting_for: int | None = None  # the rank whose bytes are waited for at the moment

    def all_reduce(self, array: np.ndarray, site: int = 0, bucket: int = 0) -> None:
        """Sums a contiguous float32 [k] over all ranks, in place. `site` and `bucket` must agree on all ranks."""
        cuts = [index * array.size // self.size for index in range(self.size + 1)]
        chunks = [array[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]
        longest = max(chunk.size for chunk in chunks)
        if self._scratch.size < longest:
            self._scratch = np.empty(longest, np.float32)
        header = bytearray(_HEADER.pack(site, bucket, array.nbytes))
        theirs = bytearray(_HEADER.size)
        self._pass_on(memoryview(header), memoryview(theirs))
        if theirs != header:
            raise RingError(f"{MARK}rank {self.rank} reduces {_HEADER.unpack(header)}, its neighbour {_HEADER.unpack(theirs)} (site, bucket, bytes): the workers do not run the same program.")
        for step in range(self.size - 1):
            mine, other = chunks[(self.rank - step) % self.size], chunks[(self.rank - step - 1) % self.size]
            received = self._scratch[:other.size]
            self._pass_on(_bytes(mine), _bytes(received))
            np.add(other, received, out=other)
        for step in range(self.size - 1):
            mine, other = chunks[(self.rank + 1 - step) % self.size], chunks[(self.rank - step) % self.size]
            self._pass_on(_bytes(mine), _bytes(other))

    def all_gather(self, data: bytes, name: str, stamp: int = 0) -> list[bytes]:
        """Every rank's bytes, in rank order; their lengths may differ.

        Args: name, what is gathered (12 ASCII characters at most), and stamp (32 bits), must agree on all ranks: so a
        rank that is elsewhere in the program, or holds other samples, is noticed at once.
        """
        blocks: list[bytes] = [b""] * self.size
        blocks[self.rank] = data
        for step in range(self.size - 1):
            mine = blocks[(self.rank - step) % self.size]
            header, theirs = _BLOCK.pack(name.encode(), stamp, len(mine)), bytearray(_BLOCK.size)
            self._pass_on(memoryview(header), memoryview(theirs))
            their_name, their_stamp, length = _BLOCK.unpack(theirs)
            other = (self.rank - 1) % self.size
            if their_name.rstrip(b"\0").decode(errors="replace") != name:
                raise RingError(f"{MARK}rank {self.rank} is at {name!r}, rank {other} at {their_name.rstrip(bytes(1)).decode(errors='replace')!r}: the workers do not run the same program, or their data does not end at the same batch.")
            if their_stamp != stamp:
                raise RingError(f"{MARK}DataError: Rank {self.rank} and rank {other} hold different {name}: the data must come in the same order on all workers; seed what shuffles it.")
            received = bytearray(length)
            self._pass_on(memoryview(mine), memoryview(received))
            blocks[(self.rank - step - 1) % self.size] = received
        return blocks

    def _pass_on(self, outgoing: memoryview, incoming: memoryview) -> None:
        """Sends to the right and receives from the left at the same time: neither may wait for the other."""
        sent = received = 0
        poll = select.poll()
        while sent < len(outgoing) or received < len(incoming):
            progress = False
            try:
                if sent < len(outgoing):
                    sent, progress = sent + self.right.send(outgoing[sent:sent + _SEND_BYTES]), True
            except BlockingIOError:
                pass
            except OSError as error:
                raise RingError(f"{MARK}lost contact with rank {(self.rank + 1) % self.size} ({error}).") from None
            try:
                if received < len(incoming):
                    count = self.left.recv_into(incoming[received:received + _SEND_BYTES])
                    if count == 0:
                        raise RingError(f"{MARK}lost contact with rank {(self.rank - 1) % self.size} (it closed the connection).")
                    received, progress = received + count, True
            except BlockingIOError:
                pass
            except OSError as error:
                raise RingError(f"{MARK}lost contact with rank {(self.rank - 1) % self.size} ({error}).") from None
            if not progress:
                self._wait(poll, sent < len(outgoing), received < len(incoming))

    def _wait(self, poll: select.poll, sending: bool, receiving: bool) -> None:
        for connection, events, wanted in ((self.right, select.POLLOUT, sending), (self.left, select.POLLIN, receiving)):
            if wanted:
                poll.register(connection, events)
            else:
                with contextlib.suppress(KeyError):
                    poll.unregister(connection)
        silent = (self.rank - 1) % self.size if receiving else (self.rank + 1) % self.size
        start = time.monotonic()
        self.waiting_for = silent
        while not poll.poll(1000 * min(self.patience, self.timeout or self.patience)):
            if self.timeout and time.monotonic() - start >= self.timeout:
                raise RingError(f"{MARK}rank {silent} was silent for {self.timeout:g} s (--collective_timeout).")
            if not self.is_alive(silent):
                raise RingError(f"{MARK}rank {silent} does not answer any more: it is stopped, or its machine or network is gone.")
        self.waiting_for = None

    def close(self) -> None:
        self.right.close()
        self.left.close()


class RingReducer:
    """`Ring.all_reduce` for lists of tensors inside a tf.function: in buckets, by a thread of its own.

    A start operation per bucket copies its gradients into a buffer and returns at once; one finish operation waits for
    all. The thread takes the buckets in one fixed order, so it does not matter in which order TensorFlow on each
    worker happens to run the start operations.
    """

    def __init__(self, ring: Ring, bucket_bytes: int):
        self.ring, self.bucket_bytes = ring, max(bucket_bytes, 1)
        self.travel_s = self.wait_s = 0.0  # in which a bucket was under way; in which all own gradients were handed over and a result was waited for
        self._sites = 0
        self._work: queue.SimpleQueue[_Site] = queue.SimpleQueue()
        self._pool: dict[int, list[np.ndarray]] = {}
        self._failure: Exception | None = None
        threading.Thread(target=self._serve, name="tfdist-ring", daemon=True).start()

    def __call__(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """The sum of each float32 tensor over all workers. Called while tracing; every worker traces the same."""
        site = _Site(self._sites, [tuple(tensor.shape) for tensor in tensors], self.bucket_bytes)
        self._sites += 1
        started = [
            tf.numpy_function(functools.partial(self._start, site, number), [tensors[index] for index in members], tf.int32)
            for number, members in enumerate(site.buckets)]
        with tf.control_dependencies(started):
            reduced = tf.numpy_function(functools.partial(self._finish, site), [], [tf.float32] * len(tensors))
        for value, tensor in zip(reduced, tensors, strict=True):
            value.set_shape(tensor.shape)
        return reduced

    def _start(self, site: _Site, number: int, *arrays: np.ndarray) -> np.int32:
        buffer = self._free_buffer(site.lengths[number])
        for index, array in zip(site.buckets[number], arrays, strict=True):
            site.view(buffer, index)[...] = array
        site.started[number].put(buffer)
        if number == 0:  # nothing can be sent before the first bucket is there
            self._work.put(site)
        return np.int32(0)

    def _finish(self, site: _Site) -> list[np.ndarray]:
        reduced: list = [None] * len(site.shapes)
        begun = time.monotonic()
        for members in site.buckets:
            buffer = site.done.get()
            if buffer is None:
                raise self._failure
            for index in members:
                reduced[index] = site.view(buffer, index)
        self.wait_s += time.monotonic() - begun
        return reduced

    def _serve(self) -> None:
        while True:
            site = self._work.get()
            for number in range(len(site.buckets)):
                buffer = site.started[number].get()
                begun = time.monotonic()
                try:
                    if self._failure is None:
                        self.ring.all_reduce(buffer, site.number, number)
                except Exception as error:  # noqa: BLE001 - raised again where the result is waited for
                    self._failure = error
                self.travel_s += time.monotonic() - begun
                site.done.put(buffer if self._failure is None else None)

    def _free_buffer(self, length: int) -> np.ndarray:
        """A zeroed or used float32 [length], aligned. TensorFlow takes results without a copy and holds on to them, so
        a buffer is free when nobody but the pool refers to it."""
        pool = self._pool.setdefault(length, [])
        for buffer in pool:
            if sys.getrefcount(buffer) == _UNUSED_REFERENCES:
                return buffer
        whole = np.zeros(length + _ALIGN, np.float32)
        start = (-whole.ctypes.data // 4) % _ALIGN
        pool.append(whole[start:start + length])
        return pool[-1]


class _Site:
    """One call of the reducer in the program: how its tensors are laid out in buckets, and the queues of a round."""

    def __init__(self, number: int, shapes: list[tuple], bucket_bytes: int):
        self.number, self.shapes = number, shapes
        sizes = [math.prod(shape) for shape in shapes]
        # The backward pass makes the last variables' gradients first.
        self.buckets: list[list[int]] = [[]]
        self._offsets, self.lengths = {}, [0]
        for index in reversed(range(len(shapes))):
            if self.buckets[-1] and (self.lengths[-1] + sizes[index]) * 4 > bucket_bytes:
                self.buckets.append([])
                self.lengths.append(0)
            self.buckets[-1].append(index)
            self._offsets[index] = self.lengths[-1]
            self.lengths[-1] += -(-sizes[index] // _ALIGN) * _ALIGN
        self.started = [queue.SimpleQueue() for _ in self.buckets]
        self.done: queue.SimpleQueue = queue.SimpleQueue()

    def view(self, buffer: np.ndarray, index: int) -> np.ndarray:
        """The part of its bucket's buffer that holds tensor `index`."""
        start, shape = self._offsets[index], self.shapes[index]
        return buffer[start:start + math.prod(shape)].reshape(shape)


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array).cast("B") if array.size else memoryview(b"")


def _connect(host: str, port: int, rank: int, patience: float = 60.0) -> socket.socket:
    deadline = time.monotonic() + patience
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=patience)
            connection.sendall(struct.pack("!I", rank))
            return connection
        except OSError as error:
            if time.monotonic() > deadline:
                raise RingError(f"{MARK}{host}:{port} cannot be reached ({error}): open the ephemeral ports between workers, or use --communication=ring.") from None
            time.sleep(0.05)


def _accept(listener: socket.socket, expected: int, patience: float = 60.0) -> socket.socket:
    listener.settimeout(patience)
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise RingError(f"{MARK}rank {expected} did not connect within {patience:g} s: open the ephemeral ports between workers, or use --communication=ring.") from None
        connection.settimeout(patience)
        if connection.recv(4, socket.MSG_WAITALL) == struct.pack("!I", expected):
            return connection
        connection.close()
