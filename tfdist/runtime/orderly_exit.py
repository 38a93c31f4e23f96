"""The end of a run whose workers are connected by TensorFlow: nobody leaves while another worker still needs it.

A worker that has received the last piece of the last collective may exit before another has received its piece. The
other would then lose its peer, or find the chief's coordination service gone, although all the work is done. So first
every worker says, through that service, that it has received everything, and waits only until all others have said so.
Then all workers except the chief exit; the chief, whose process runs the service, exits when nobody answers at the
other addresses any more.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import tensorflow as tf

from tfdist.compat import tensorflow_cluster
from tfdist.control.cluster import Cluster
from tfdist.control.preflight import answers

_LAST_WORDS_SECONDS = 120.0  # for all others to finish as well, including the last uploads of trackers
_GONE_SECONDS = 10.0  # the time that the chief gives the other processes to end
_LOOK_SECONDS = 0.02
_AT_ONCE = 32


def say_goodbye(cluster: Cluster, strategy: tf.distribute.Strategy) -> None:
    """Leaves after the last collective call; end the process soon. Raises nothing: the work is done in any case."""
    tensorflow_cluster.stop_watching_peers(strategy)
    with contextlib.suppress(tf.errors.OpError):
        tensorflow_cluster.wait_at_barrier("tfdist/farewell", _LAST_WORDS_SECONDS)
    if cluster.rank == 0:
        _wait_until_gone([address for rank, address in enumerate(cluster.peers) if rank])


def _wait_until_gone(addresses: list[str]) -> None:
    deadline = time.monotonic() + _GONE_SECONDS
    with ThreadPoolExecutor(_AT_ONCE, "tfdist-farewell") as probes:
        while addresses and time.monotonic() < deadline:
            found = list(probes.map(answers, addresses))
            addresses = [address for address, there in zip(addresses, found, strict=True) if there]
            if addresses:
                time.sleep(_LOOK_SECONDS)
