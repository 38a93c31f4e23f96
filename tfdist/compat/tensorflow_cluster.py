"""Work of TensorFlow's context and strategies for a cluster of workers that has no public name (TensorFlow 2.21)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context

from tfdist.control.cluster import Cluster


def _context() -> Any:
    """The process's one context, which TensorFlow makes when it is first asked."""
    return context.context()


def configure_coordination_service(leader: str, heartbeat_s: float, register_s: float) -> None:
    """Sets, before a multi-worker strategy is made, which task ("/job:worker/replica:0/task:0") hosts the service that
    watches over the workers, after how many seconds of silence one counts as lost, and how long they may take to come.

    Relies on `Context.configure_coordination_service`; without it the death of a peer that cannot say so (SIGSTOP,
    power, network) is noticed late or never.
    """
    _context().configure_coordination_service(
        service_type="standalone",
        service_leader=leader,
        heartbeat_timeout_in_ms=int(heartbeat_s * 1000),
        cluster_register_timeout_in_ms=int(register_s * 1000),
    )


def has_computed() -> bool:
    """Whether TensorFlow has made its devices, so that it is too late for `start_collectives`. Relies on
    `Context._context_handle`; if that is gone, TensorFlow says so itself, in an error of its own.
    """
    return getattr(_context(), "_context_handle", None) is not None


def start_collectives(cluster: Cluster) -> None:
    """Starts the server by which this process's collectives meet those of the others, without any tf.distribute
    strategy and without TensorFlow's service that watches over workers: who does this watches over them itself.

    Relies on `Context.configure_collective_ops` and `enable_collective_ops`, which is what MultiWorkerMirroredStrategy
    calls; without them collectives are to be had through that strategy only.
    """
    this = _context()
    this.configure_collective_ops(
        collective_leader=cluster.task(0),
        scoped_allocator_enabled_ops=(),
        device_filters=(cluster.task(cluster.rank),),
    )
    this.enable_collective_ops(
        tensorflow_server_pb2.ServerDef(
            cluster=tf.train.ClusterSpec(cluster.training_spec).as_cluster_def(),
            default_session_config=this.config,
            job_name=cluster.role,
            task_index=cluster.index,
            protocol="grpc",
        )
    )
    this.ensure_initialized()


def is_healthy(task: str, timeout_s: float) -> bool:
    """Whether a task answers. Relies on `Context.check_collective_ops_peer_health`; without it our own ring does not
    know whether the neighbour that it waits for is alive.
    """
    try:
        _context().check_collective_ops_peer_health(task, timeout_in_ms=int(timeout_s * 1000))
    except tf.errors.OpError:
        return False
    return True


def abort_collectives(message: str) -> None:
    """Ends every collective of this process with a DeadlineExceededError of this message. Relies on
    `Context.abort_collective_ops`; without it a worker waits for ever for one that is stuck.
    """
    _context().abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, message)


def wait_at_barrier(name: str, timeout_s: float) -> None:
    """Returns when all workers have called it, through the coordination service. Relies on `Context.wait_at_barrier`;
    without it a worker that ends first may take the others' last results with it. Raises tf.errors.OpError.
    """
    _context().wait_at_barrier(name, int(timeout_s * 1000))


def stop_watching_peers(strategy: Any) -> None:
    """Ends TensorFlow's thread that looks after the other workers: it would report those who have left as lost. Relies
    on `_check_health_thread_should_stop` of the strategy's `extended`; if that is gone, the thread goes on."""
    stop = getattr(strategy.extended, "_check_health_thread_should_stop", None)
    if stop is not None:
        stop.set()


def wait_until_computed(value: Any) -> None:
    """Returns when a ClusterCoordinator's result is there, and raises what its computation raised. Relies on
    `RemoteValueImpl._wait_and_maybe_error`; with `fetch` alone, errors of the computation and of the way back could not
    be told apart.
    """
    value._wait_and_maybe_error()
