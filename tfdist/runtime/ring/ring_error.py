"""Errors of a ring (ring.py), and their meaning for a user.

Such an error passes through TensorFlow as text.
"""

from __future__ import annotations

from tfdist.control.exit_codes import ConfigError, DataError, PeerLostError, TfdistError

MARK = "tfdist ring: "  # in the text of every RingError


class RingError(RuntimeError):
    """A neighbor is gone, silent, or doing something else."""


def user_error(text: str) -> TfdistError:
    """Converts the text of a RingError, perhaps inside another text, to the error for the user: of the kind whose name
    it begins with, or else a lost peer."""
    sentence = text[text.index(MARK) + len(MARK) :].splitlines()[0]
    for kind in (ConfigError, DataError):
        if sentence.startswith(f"{kind.__name__}: "):
            return kind(sentence.removeprefix(f"{kind.__name__}: "))
    return PeerLostError(f"{sentence} Look at the log of that worker for the cause, then start all workers again.")


def unanswered(rank: int) -> str:
    """The text of the error for a rank from which no heartbeat comes any more."""
    return f"{MARK}rank {rank} no longer answers: it is stopped, or its machine or network is down."


def overdue(rank: int, size: int, timeout: float) -> str:
    """The text of the error, on this rank of `size`, for a collective that has not ended within `timeout` seconds."""
    others = ", ".join(str(other) for other in range(size) if other != rank)
    return (
        f"{MARK}rank {rank} has waited for more than --collective_timeout={timeout:g} s for one of ranks {others},"
        " which is stuck or much slower."
    )


def held_differently(rank: int, other: int, what: str) -> RingError:
    """The error for data that should be the same on all ranks but differs."""
    return RingError(
        f"{MARK}DataError: Rank {rank} and rank {other} have different {what}: the data must come in the same order on"
        " all workers; seed all shuffling."
    )
