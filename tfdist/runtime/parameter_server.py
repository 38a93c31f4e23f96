"""Parameter servers through tf.distribute: the chief's side as a Runtime, and the program of workers and servers.

Only the chief composes, evaluates and saves; so as a Runtime it is one worker with one replica. Extra methods send
functions to the workers (`call`) and report lost processes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import TypeGuard

import tensorflow as tf

from tfdist.compat.tensorflow_cluster import wait_until_computed
from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError, ExitCode, PeerLostError
from tfdist.control.packet_filter import own_address_only
from tfdist.control.probes import Prober, await_all
from tfdist.control.signals import StopSignals, on_hangup
from tfdist.control.terminal import say_at_once
from tfdist.runtime.base import Runtime
from tfdist.runtime.one_device import OneDevice

_LOST_SECONDS = 5.0  # after an error of TensorFlow: how long to look for a missing parameter server


class ParameterServer(OneDevice):
    """The chief. `devices`: the devices of the parameter servers."""

    name = "parameter_server"

    def __init__(self, cluster: Cluster, config: Config):
        self.cluster = cluster
        self.compute_workers = len(cluster.spec["worker"])
        self.devices = [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(len(cluster.spec["ps"]))]
        await_all(cluster.others("ps", "worker"), config.cluster.startup_timeout)
        self._watch = Prober(cluster.others("ps", "worker"))
        self._missing: set[str] = set()  # lost workers
        tf.get_logger().setLevel("CRITICAL")  # a sentence names lost processes; TensorFlow would add pages
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            _spec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        with own_address_only(*_addresses(cluster)):
            self._strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self._strategy)

    @classmethod
    def create(cls, config: Config, cluster: Cluster) -> ParameterServer:
        return cls(cluster, config)

    def call(self, function: tf.types.experimental.ConcreteFunction, arguments: Sequence) -> Callable[[], tuple | None]:
        """Schedules a call on the next free worker, and on another worker if that one dies.

        Returns a function that waits for the result and returns it as NumPy arrays, or None if the call was made, but
        its worker died before the result arrived. Raises TensorFlow's errors; see `lost`.
        """
        value = self._coordinator.schedule(function, args=tuple(arguments))

        def fetch() -> tuple | None:
            wait_until_computed(value)  # separate from the fetch, whose errors mean something else
            try:
                return value.fetch()
            except (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.InvalidArgumentError) as error:
                if "/job:ps" in str(error.message):
                    raise
                return None

        return fetch

    def news(self) -> list[str]:
        """Sentences about workers that have gone or come back. Raises PeerLostError if a parameter server is gone."""
        gone = self._watch.gone()
        if servers := [name for name in gone if name.startswith("ps ")]:
            raise PeerLostError(
                f"Lost {', '.join(servers)}, with the weights: look at its log for the cause, then start all again,"
                " from the newest snapshot."
            )
        missing = set(gone)
        sentences = [f"Lost {name}; its work goes to the others." for name in sorted(missing - self._missing)]
        sentences += [f"{name} is back." for name in sorted(self._missing - missing)]
        self._missing = missing
        return sentences

    def lost(self, error: BaseException) -> PeerLostError | None:
        """Returns an error about the lost parameter server that caused an error of TensorFlow, or None."""
        if not isinstance(error, tf.errors.OpError):
            return None
        text = str(getattr(error, "message", ""))
        deadline = time.monotonic() + _LOST_SECONDS
        while time.monotonic() < deadline:
            try:
                self.news()
            except PeerLostError as found:
                return found
            time.sleep(0.05)
        if "/job:ps" in text or isinstance(error, tf.errors.UnavailableError):
            return PeerLostError(
                "Lost contact with a parameter server: look at their logs for the cause, then start all again."
                f" TensorFlow reports: {next(iter(text.strip().splitlines()), type(error).__name__)[:300]}"
            )
        return None

    def close(self) -> None:
        self._watch.close()


def has_servers(runtime: Runtime) -> TypeGuard[ParameterServer]:
    """Whether parameter servers hold the weights, and workers can be called."""
    return bool(getattr(runtime, "devices", ()))


def prepare(config: Config, cluster: Cluster) -> Config:
    """Returns the configuration with enough threads for all calls; also sets the environment, so call it before
    TensorFlow starts.

    Each call that a TensorFlow server answers blocks a thread until its answer is complete. With one thread, two calls
    that wait for each other's process would hang forever; the threads are idle most of the time.
    Raises ConfigError if the cluster or the configuration does not suit a parameter-server run.
    """
    workers = len(cluster.spec.get("worker", ()))
    if not (cluster.spec.get("chief") and cluster.spec.get("ps") and workers):
        raise ConfigError(
            "--strategy=parameter_server needs a chief, workers and ps in TF_CONFIG: start it with `python -m"
            " tfdist.launch --workers=2 --ps=1 -- FLAGS`."
        )
    if config.servers.backup_workers >= workers:
        raise ConfigError(
            f"--backup_workers={config.servers.backup_workers} leaves none of {workers} workers for the step itself:"
            " lower it."
        )
    least = 2 * workers + 2
    threads = config.cluster.inter_op_threads or int(os.environ.get("TF_NUM_INTEROP_THREADS") or os.cpu_count() or 1)
    os.environ["TF_NUM_INTEROP_THREADS"] = str(max(least, threads))
    return config.replace(inter_op_threads=max(least, threads) if config.cluster.inter_op_threads else 0)


def serve(config: Config, cluster: Cluster, is_finished: Callable[[], bool]) -> ExitCode:
    """Runs a worker or a parameter server: works for the chief until the chief is gone.

    is_finished: tells whether the run has ended.
    Returns PREEMPTED if this process was asked to end, OK if the run has ended; otherwise raises PeerLostError.
    Raises StartupError if the chief does not appear in time.
    """
    config = prepare(config, cluster)
    asked, signals = [], StopSignals()

    def on_term(number: int, *_) -> None:
        if signals.is_second(number):
            os._exit(128 + signal.SIGTERM)
        if not asked:
            asked.append(True)
            say_at_once("tfdist: SIGTERM: ending when the chief has saved and ended.")

    threads = config.cluster
    options = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=threads.intra_op_threads, inter_op_parallelism_threads=threads.inter_op_threads
    )
    options.gpu_options.allow_growth = True
    if config.run.deterministic:
        tf.config.experimental.enable_op_determinism()
    with own_address_only(*_addresses(cluster)):
        tf.distribute.Server(
            _spec(cluster), job_name=cluster.role, task_index=cluster.index, protocol="grpc", config=options
        )
    signal.signal(signal.SIGTERM, on_term)
    on_hangup(lambda *_: say_at_once("tfdist: SIGHUP: ending when the chief has ended."))
    print(
        f"tfdist: {cluster.describe()}, at {cluster.spec[cluster.role][cluster.index]}; waiting for the chief.",
        flush=True,
    )
    chief = cluster.others("chief")
    await_all(chief, threads.startup_timeout, lambda: bool(asked))
    watch = Prober(chief)
    while not watch.gone():
        time.sleep(0.1)
    if asked:
        return ExitCode.PREEMPTED
    if is_finished():
        print("tfdist: the run is finished.", flush=True)
        return ExitCode.OK
    raise PeerLostError(f"Lost {', '.join(chief)} before the run was finished: look at its log for the cause.")


def _addresses(cluster: Cluster) -> tuple[str, list[str]]:
    """Returns (this process's address, the addresses of all processes)."""
    return cluster.spec[cluster.role][cluster.index], [
        address for addresses in cluster.spec.values() for address in addresses
    ]


def _spec(cluster: Cluster) -> tf.train.ClusterSpec:
    return tf.train.ClusterSpec({role: cluster.spec[role] for role in ("chief", "worker", "ps")})
