"""What TensorFlow's errors mean to a user."""

from __future__ import annotations

import re

import tensorflow as tf

from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError, DataError, PeerLostError, TfdistError
from tfdist.runtime.ring import MARK

_PEER_ERRORS = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError, tf.errors.DeadlineExceededError)

# Horovod's error for all that ends its background threads, and Gloo's own where it reaches an operation.
_HOROVOD_DOWN = re.compile(r"Horovod has been shut down|gloo/.*(Connection|[Tt]imed? ?out|peer)")
# How runtime/collectives.py names its operations.
_GROUP = re.compile(r"tfdist_(?P<kind>\w+?)_of_ranks_(?P<ranks>\d\w*?)_end")


def explain(error: BaseException, cluster: Cluster) -> TfdistError | None:
    """The error as a sentence with its exit code, or None if it is not one that we know."""
    if isinstance(error, TfdistError) or not isinstance(error, tf.errors.OpError):
        return None
    text = str(error.message)
    if _HOROVOD_DOWN.search(text):
        return PeerLostError(
            "Horovod stopped: a worker died, was silent for --heartbeat_timeout, or did not enter a collective within --collective_timeout. "
            "Look at the log of the worker that ended first, or has not ended, for the cause, then start all workers again.")
    if isinstance(error, tf.errors.ResourceExhaustedError):
        return ConfigError(f"Out of memory: lower --micro_batch (and raise --accumulation by as much), or use --precision=bfloat16. TensorFlow says: {_first_line(text)}")
    if MARK in text:
        return of_ring(text)
    if "DataError: " in text:  # raised by a source inside tf.data
        return DataError(text[text.index("DataError: ") + len("DataError: "):].splitlines()[0])
    if cluster.size > 1 and (isinstance(error, _PEER_ERRORS) or "ollective" in text):
        if isinstance(error, tf.errors.DeadlineExceededError) or "timed out" in text.lower():
            if group := _GROUP.search(text, text.lower().rfind("timed out") + 1):
                ranks = group["ranks"].replace("_to_", " to ").replace("_", ", ")
                return PeerLostError(
                    f"The {group['kind']} of ranks {ranks} did not end within --collective_timeout: one of these ranks is stuck, much slower, or does "
                    "not count itself to that group. Look at their logs, then start all workers again.")
            return PeerLostError(
                "A collective did not end within --collective_timeout: a peer is stuck or much slower, or the time-out is shorter than "
                f"its longest save or evaluation. TensorFlow says: {_first_line(text)}")
        return PeerLostError(f"Lost contact with {_peer(text, cluster)}: look at its log for the cause, then start all workers again. TensorFlow says: {_first_line(text)}")
    return None


def of_ring(text: str) -> TfdistError:
    """An error of runtime/ring.py from its text; what begins with the name of an error is one, all else a lost peer."""
    sentence = text[text.index(MARK) + len(MARK):].splitlines()[0]
    for kind in (ConfigError, DataError):
        if sentence.startswith(f"{kind.__name__}: "):
            return kind(sentence.removeprefix(f"{kind.__name__}: "))
    return PeerLostError(f"{sentence} Look at the log of that worker for the cause, then start all workers again.")


def _peer(text: str, cluster: Cluster) -> str:
    """The first other task that TensorFlow's message names, as rank and address."""
    own = f"/job:{cluster.role}/replica:0/task:{cluster.index}"
    for role, index in re.findall(r"/job:(\w+)/replica:0/task:(\d+)", text):
        if f"/job:{role}/replica:0/task:{index}" != own and role in cluster.spec and int(index) < len(cluster.spec[role]):
            return cluster.name(cluster.peers.index(cluster.spec[role][int(index)]))
    return "a peer"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else "nothing"
