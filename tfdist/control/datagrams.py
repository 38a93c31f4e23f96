"""Authenticated datagrams: only the workers of one job can make them, for one session, and each is accepted only once.

  mark (8 bytes), HMAC-SHA256 of the mark and all that follows (16), rank (4), stamp (8), data

The mark is the same in all datagrams. Strangers do not know it unless they have seen a datagram; it lets the kernel
drop their floods (packet_filter.py). The stamp is the sender's clock in nanoseconds. It must increase, so that no
datagram is accepted twice. A datagram that took much longer than the fastest so far was held back by somebody, and is
not accepted. The clocks need not agree.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import time

from tfdist.control.token import Secret

MOST_BYTES = 1400  # a datagram of this size fits into one packet on any network
MARK_BYTES = 8
_CODE_BYTES = 16
_HEAD = struct.Struct("!iQ")  # rank, stamp
_LONGEST_DELAY = 30 * 10**9  # nanoseconds more than the fastest
_DRIFT = 1000  # a clock may be slower than ours by one part of so many; those of two hosts differ by far less


class Seals:
    """Seals and opens the datagrams of one session. context: texts that, like the secret, only its workers know."""

    def __init__(self, secret: Secret, rank: int, purpose: str, *context: str):
        self._key, self._rank = secret.key(purpose, *context), rank
        self.mark = secret.key(f"{purpose} mark", *context)[:MARK_BYTES]
        self._sent = 0
        self._newest: dict[int, int] = {}  # rank -> stamp
        # rank -> smallest difference between our clock and a stamp, and when the last datagram came, by our clock
        self._fastest: dict[int, tuple[int, int]] = {}

    def seal(self, data: bytes) -> bytes:
        self._sent = max(self._sent + 1, time.monotonic_ns())
        body = _HEAD.pack(self._rank, self._sent) + data
        return self.mark + self._code(body) + body

    def open(self, datagram: bytes) -> tuple[int, bytes] | None:
        """Returns (the rank of the sender, the data); None if the datagram is not of this session, repeated or late."""
        code, body = datagram[MARK_BYTES : MARK_BYTES + _CODE_BYTES], datagram[MARK_BYTES + _CODE_BYTES :]
        if len(body) < _HEAD.size or len(datagram) > MOST_BYTES or not hmac.compare_digest(code, self._code(body)):
            return None
        rank, stamp = _HEAD.unpack_from(body)
        now = time.monotonic_ns()
        took = now - stamp
        fastest, last = self._fastest.get(rank, (took, now))
        fastest = min(took, fastest + (now - last) // _DRIFT)
        self._fastest[rank] = (fastest, now)
        if stamp <= self._newest.get(rank, -1) or took - fastest > _LONGEST_DELAY:
            return None
        self._newest[rank] = stamp
        return rank, body[_HEAD.size :]

    def _code(self, body: bytes) -> bytes:
        return hmac.digest(self._key, self.mark + body, hashlib.sha256)[:_CODE_BYTES]
