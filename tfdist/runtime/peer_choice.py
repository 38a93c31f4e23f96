"""Chooses how tensors travel between plain processes: once, by all workers together, from the facts about each worker.

socket    our own ring over TCP, through host memory (sockets.py)
ring      TensorFlow's collectives over gRPC, through host memory (tensorflow_peers.py)
nccl      TensorFlow's collectives from GPU to GPU
auto      nccl if every worker has a GPU, else socket
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist.compat import tensorflow_cluster
from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.control.terminal import say
from tfdist.runtime.decisions import check_same_communication
from tfdist.runtime.peers import Peers
from tfdist.runtime.ring.control_ring import ControlRing
from tfdist.runtime.sockets import Sockets
from tfdist.runtime.tensorflow_peers import TensorflowPeers

_BEFORE = "call tfdist.init() before anything that makes a tensor or a model"


class Worker(NamedTuple):
    """The facts about one worker on which the choice depends."""

    asked: str  # --communication
    has_gpu: bool
    has_computed: bool  # then TensorFlow's collectives cannot be started any more


class ConnectedPeers:
    """Creates the runtime of --strategy=sockets; see config/strategies.py."""

    @staticmethod
    def create(config: Config, cluster: Cluster) -> Peers:
        """Meets the other workers. Raises ConfigError if their settings differ, and the errors of ControlRing."""
        if not cluster.peers:
            raise ConfigError(
                "--strategy=sockets is for several workers, but TF_CONFIG lists none: start them with tfdist.launch, or"
                " use --strategy=one_device."
            )
        has_gpu = bool(tf.config.list_physical_devices("GPU"))
        own_answer = Worker(config.strategy.communication, has_gpu, tensorflow_cluster.has_computed())
        control = ControlRing(config, cluster)
        answers = control.gather_for_user(json.dumps(own_answer).encode(), "choice")
        workers = [Worker(*json.loads(bytes(each))) for each in answers]
        way, remark = choose(workers)
        if remark and cluster.rank == 0:
            say(remark)
        if way == "socket":
            return Sockets(config, cluster, control)
        return TensorflowPeers(config, cluster, control, nccl=way == "nccl")


def choose(workers: Sequence[Worker]) -> tuple[str, str]:
    """Returns (socket, ring or nccl; a remark for the user, or "").

    Raises ConfigError, the same on all workers.
    """
    asked = workers[0].asked
    without = _ranks(rank for rank, worker in enumerate(workers) if not worker.has_gpu)
    late = _ranks(rank for rank, worker in enumerate(workers) if worker.has_computed)
    check_same_communication([worker.asked for worker in workers])
    if asked == "nccl" and without:
        raise ConfigError(
            f"--communication=nccl, but rank {without} has no GPU that TensorFlow sees: use --communication=socket, or"
            " give every worker a GPU."
        )
    if asked in ("ring", "nccl"):
        if late:
            raise ConfigError(
                f"--communication={asked}, but TensorFlow has computed something on rank {late} already, and its"
                f" collectives must be started first: {_BEFORE}, or use --communication=socket."
            )
        return asked, ""
    if asked == "auto" and len(workers) > 1 and not without and late:
        return "socket", f"gradients pass through host memory, not NCCL: to change that, {_BEFORE}."
    if asked == "auto" and without and any(worker.has_gpu for worker in workers):
        return "socket", f"gradients pass through host memory, not NCCL, as rank {without} has no GPU."
    return ("nccl" if asked == "auto" and not without else "socket"), ""


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
