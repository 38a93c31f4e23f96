"""Synchronous data parallelism of several processes through MultiWorkerMirroredStrategy, each with one or more devices.

On CPUs gradients travel through tfdist's ring (ring.py) instead of TensorFlow's collectives, if --communication allows.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.compat import tensorflow_cluster
from tfdist.compat.tensorflow_interpreter_lock import interpreter_released
from tfdist.compat.tensorflow_preemption import sigterm_kept
from tfdist.compat.tensorflow_replicas import own_first_values
from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError
from tfdist.control.packet_filter import own_address_only
from tfdist.runtime.array_bytes import from_bytes
from tfdist.runtime.collective_timeout import Overdue
from tfdist.runtime.collectives import Group
from tfdist.runtime.decisions import check_same_communication, texts_of_all
from tfdist.runtime.first_values import chiefs_first_values
from tfdist.runtime.mirrored import StrategyRuntime, communication_options, to_words
from tfdist.runtime.operations import OUR_RING, Collective, of_group, through_tensorflow
from tfdist.runtime.orderly_exit import say_goodbye
from tfdist.runtime.reducer import RingReducer
from tfdist.runtime.ring.ring import Ring
from tfdist.runtime.ring.ring_connections import Patience
from tfdist.runtime.ring.ring_error import RingError, overdue, user_error

_LONGEST_ENDPOINT = 320  # bytes: a host name has at most 253, plus a port
_VERDICT_SECONDS = 5.0  # until all have found that they differ
_FEW_BYTES, _BLOCK = 2**20, 2**22  # what is broadcast by a sum; words (16 MiB) in which more than that is sent


class Worker(NamedTuple):
    """What must be the same on all workers, or their collectives do not match."""

    asked: str  # --communication
    gpus: int


def check_alike(workers: Sequence[Worker]) -> None:
    """Raises ConfigError, the same on all workers, unless they are alike."""
    check_same_communication([worker.asked for worker in workers])
    for rank, worker in enumerate(workers):
        if worker.gpus != workers[0].gpus:
            raise ConfigError(
                f"GPUs that TensorFlow sees: {workers[0].gpus} on rank 0, but {worker.gpus} on rank {rank}. Give every"
                " worker the same number, or hide all by CUDA_VISIBLE_DEVICES=-1."
            )


def _meet(cluster: Cluster, own: Worker, timeout_s: float) -> None:
    """Checks that the workers are alike, before their first collective. Raises ConfigError, tf.errors.OpError."""
    said = tensorflow_cluster.texts_of_all(cluster, "tfdist/worker", json.dumps(own), timeout_s)
    try:
        check_alike([Worker(*json.loads(each)) for each in said])
    except ConfigError:
        # The chief holds what the others have said until they have read it.
        with contextlib.suppress(tf.errors.OpError):
            tensorflow_cluster.wait_at_barrier("tfdist/verdict", _VERDICT_SECONDS)
        raise


class OnlyWorker(tf.distribute.cluster_resolver.TFConfigClusterResolver):
    """For MultiWorkerMirroredStrategy with one worker, which opens no port then, whatever TF_CONFIG lists: TensorFlow's
    own reads TF_CONFIG.

    Relies on `CollectiveAllReduceExtended._initialize_local_devices`: of a resolver of any other class the strategy
    takes the GPUs that this tells, as a rule none, in place of those that the process has.
    """

    def cluster_spec(self) -> tf.train.ClusterSpec:
        return tf.train.ClusterSpec({})


class MultiWorker(StrategyRuntime):
    """A runtime over MultiWorkerMirroredStrategy. The cluster must have passed control/preflight.py."""

    name = "multi_worker"
    cluster: Cluster

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        def create(make: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
            with own_first_values(self.strategy):
                return make(**arguments)

        with self.strategy.scope(), chiefs_first_values(self, create):
            yield

    def use_ring(self, cluster: Cluster, config: Config) -> None:
        """Makes runtime/ring/ring.py reduce float32 tensors from now on."""
        patience = config.cluster.heartbeat_timeout

        def exchange(endpoint: str) -> list[str]:
            return texts_of_all(self, endpoint, _LONGEST_ENDPOINT)

        def is_alive(rank: int) -> bool:
            return tensorflow_cluster.is_healthy(cluster.task(rank), patience)

        try:
            ring = Ring(
                cluster,
                exchange,
                Patience(config.strategy.collective_timeout, is_alive, patience),
                share=config.strategy.communication == "auto",
            )
        except RingError as error:
            raise user_error(str(error)) from error
        self._reducer = RingReducer(ring, int(config.strategy.pack_mb * 2**20))

    @property
    def uses_ring(self) -> bool:
        """Whether gradients travel through runtime/ring/ring.py."""
        return self._reducer is not None

    @property
    def uses_nccl(self) -> bool:
        """Whether TensorFlow's collectives go from GPU to GPU."""
        ring = tf.distribute.experimental.CommunicationImplementation.RING
        return bool(tf.config.list_logical_devices("GPU")) and self.options.implementation != ring

    def collectives(self) -> dict[str, Collective]:
        """all_reduce and all_gather use tf.distribute, or the ring where gradients travel through it.

        tf.distribute has no others; the rest are TensorFlow's bare operations, which support one replica per worker.
        """
        found = {}
        if self.local_replicas == 1:
            tasks = [self.cluster.task(rank) for rank in range(self.size)]
            found = of_group(Group(range(self.size), self.rank, tasks=tasks, nccl=self.uses_nccl))
        return {
            **found,
            "all_reduce": Collective(
                OUR_RING if self.uses_ring else through_tensorflow(self.uses_nccl), lambda x: self.all_reduce([x])[0]
            ),
            "all_gather": Collective(
                through_tensorflow(self.uses_nccl),
                lambda x: tf.distribute.get_replica_context().all_gather(x, axis=0, options=self.options),
            ),
        }

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        # A sum, as of StrategyRuntime, takes four times as long: it sends 64 bits for 32, and sends them back.
        size = sum(array.nbytes for array in map(np.asarray, arrays))
        if self.size == 1 or size <= _FEW_BYTES:
            return super().broadcast(arrays)
        words = np.empty(-(-size // 4), np.int32) if self.rank else to_words(arrays).view(np.int32)
        block = np.zeros(_BLOCK, np.int32)
        for start in range(0, words.size, _BLOCK):
            part = words[start : start + _BLOCK]
            if not self.rank:
                block[: part.size] = part
            sent = self.watched(lambda send, args: send(*args), self._of_chief, (tf.constant(block),))
            if self.rank:
                part[...] = sent.numpy()[: part.size]
        return from_bytes(words.data.cast("B"), arrays)

    @functools.cached_property
    def _of_chief(self) -> Callable[[tf.Tensor], tf.Tensor]:
        """The chief's block on every worker, from host to host."""
        tasks = [self.cluster.task(rank) for rank in range(self.size)]
        group = Group(range(self.size), self.rank, tasks=tasks, salt="between steps ")
        spec = tf.TensorSpec([_BLOCK], tf.int32)
        return tf.function(lambda block: group.broadcast(block, 0), autograph=False, input_signature=[spec])

    def watch_for_stuck_peers(self, timeout: float) -> None:
        """Makes it an error, from now on, if a collective does not end within `timeout` seconds; 0: never."""

        def give_up() -> None:
            tensorflow_cluster.abort_collectives(overdue(self.rank, self.size, timeout))

        if timeout and self.size > 1:
            self._overdue = Overdue(timeout, give_up)

    def close(self) -> None:
        if self.size > 1:
            say_goodbye(self.cluster, self.strategy)

    @classmethod
    def create(cls, config: Config, cluster: Cluster) -> MultiWorker:
        options = communication_options(config.strategy)
        if cluster.size > 1:
            os.environ["TF_CONFIG"] = cluster.tf_config()
            tensorflow_cluster.configure_coordination_service(
                "/job:chief/replica:0/task:0" if "chief" in cluster.spec else "/job:worker/replica:0/task:0",
                heartbeat_s=config.cluster.heartbeat_timeout,
                register_s=config.cluster.startup_timeout,
            )
        with own_address_only(cluster.address, cluster.peers), interpreter_released(), sigterm_kept():
            resolver = None if cluster.size > 1 else OnlyWorker()
            strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
        runtime = cls(strategy, options, rank=cluster.rank, size=cluster.size)
        runtime.cluster = cluster
        choice, gpus = config.strategy.communication, len(tf.config.list_logical_devices("GPU"))
        if cluster.size > 1:
            _meet(cluster, Worker(choice, gpus), config.cluster.startup_timeout)
        runtime.watch_for_stuck_peers(config.strategy.collective_timeout)
        suits = cluster.size > 1 and runtime.local_replicas == 1 and not gpus
        if choice == "socket" and not suits:
            raise ConfigError(
                "--communication=socket is for several workers of one CPU replica each: use --communication=auto."
            )
        if suits and choice in ("auto", "socket"):
            runtime.use_ring(cluster, config)
        return runtime
