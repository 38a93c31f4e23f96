"""Chooses the faster all-reduce between hosts, a ring or doubling (ring.py), from measurements of the link.

Legend. n: ranks; S: bytes; alpha: seconds per exchange, however short; beta: seconds per byte. The algorithms take

    ring         (2n - 1) alpha + 2 (n - 1) / n S beta         with the exchange in which the ranks meet
    by doubling  log2(n) alpha + (n - 1) S beta + n (n - 1) c  c: seconds for one addition of two short arrays

A tree (2 log2(n) alpha + 2 log2(n) S beta) and halving-doubling (2 log2(n) alpha + 2 (n - 1) / n S beta) add up in
another order, so that the bits of the result would depend on the measurements; and for small arrays they wait twice as
often as doubling. The ring and doubling give the same bits, so that a run that resumes on another link ends as it would
have ended on the first.
"""

from __future__ import annotations

import math
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfdist.runtime.ring.ring_connections import RingConnections

_ROUNDS = 5
_LARGE_BYTES = 1 << 20  # bytes that a rank receives in total
_ADDITION_SECONDS = 1e-6
_LEAST_SECONDS_PER_BYTE = 1e-15  # the measured value may be 0
_FOUND = struct.Struct("!dd")


@dataclass(frozen=True)
class Link:
    """The slowest link of all ranks. latency_s: alpha; seconds_per_byte: beta."""

    latency_s: float
    seconds_per_byte: float
    ranks: int

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth, 1 / beta."""
        return 1 / max(self.seconds_per_byte, _LEAST_SECONDS_PER_BYTE)

    @property
    def doubled_bytes(self) -> int:
        """The largest number of bytes for which doubling is quicker."""
        n = self.ranks
        saved = (2 * n - 1 - math.ceil(math.log2(n))) * self.latency_s - n * (n - 1) * _ADDITION_SECONDS
        return max(0, int(saved / ((n - 1) * (1 - 2 / n)) * self.bytes_per_second))


@dataclass(frozen=True)
class GradientPath:
    """How gradients travel between workers: a text for the log, and the measured link, if it was measured."""

    words: str
    link: Link | None = None


def measured(connections: RingConnections) -> Link:
    """Measures the slowest link; returns the same result on all ranks. A collective call of a few milliseconds."""

    def seconds(data: bytes) -> float:
        """The duration of one gather: the fastest of several."""
        taken = []
        for _ in range(_ROUNDS):
            begun = time.monotonic()
            connections.all_gather(data, "measured")
            taken.append(time.monotonic() - begun)
        return min(taken)

    n, exchanges = connections.size, len(connections.distances)
    each = _LARGE_BYTES // (n - 1)
    short, long = seconds(b""), seconds(bytes(each))
    link = _FOUND.pack(short / exchanges, max(long - short, 0.0) / (each * (n - 1)))
    found = [_FOUND.unpack(other) for other in connections.all_gather(link, "link")]
    return Link(max(latency for latency, _ in found), max(per_byte for _, per_byte in found), n)
