"""Parts of TensorFlow's context and strategies for a cluster that have no public name (TensorFlow 2.21)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context

from tfdist.control.cluster import Cluster


def _context() -> Any:
    """The context of the process, which TensorFlow creates at the first access."""
    return context.context()


def configure_coordination_service(leader: str, heartbeat_s: float, register_s: float) -> None:
    """Configures the service that watches over the workers; call it before a multi-worker strategy is made. leader: the
    task ("/job:worker/replica:0/task:0") that hosts the service. heartbeat_s: after how many seconds of silence a
    worker counts as lost. register_s: how long workers may take to register.

    Relies on `Context.configure_coordination_service`; without it the death of a peer that cannot report it (SIGSTOP,
    power, network) is noticed late or never.
    """
    _context().configure_coordination_service(
        service_type="standalone",
        service_leader=leader,
        heartbeat_timeout_in_ms=int(heartbeat_s * 1000),
        cluster_register_timeout_in_ms=int(register_s * 1000),
    )


def has_computed() -> bool:
    """Whether TensorFlow has created its devices, so that it is too late for `start_collectives`. Relies on
    `Context._context_handle`; if that is gone, TensorFlow itself raises an error.
    """
    return getattr(_context(), "_context_handle", None) is not None


def start_collectives(cluster: Cluster) -> None:
    """Starts the server that connects this process's collectives with those of the others, without any tf.distribute
    strategy and without TensorFlow's service that watches over workers: the caller must watch over them itself.

    Relies on `Context.configure_collective_ops` and `enable_collective_ops`, which MultiWorkerMirroredStrategy calls;
    without them collectives are available through that strategy only.
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
    know whether the neighbor that it waits for is alive.
    """
    try:
        _context().check_collective_ops_peer_health(task, timeout_in_ms=int(timeout_s * 1000))
    except tf.errors.OpError:
        return False
    return True


def abort_collectives(message: str) -> None:
    """Ends every collective of this process with a DeadlineExceededError with this message. Relies on
    `Context.abort_collective_ops`; without it a worker waits forever for one that is stuck.
    """
    _context().abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, message)


def texts_of_all(cluster: Cluster, name: str, text: str, timeout_s: float) -> list[str]:
    """Returns the text of each worker, in rank order, through the coordination service: for what must be known before
    the first collective. name: of this exchange, used once. Raises tf.errors.OpError.

    Relies on `Context.set_config_key_value` and `get_config_key_value`; without them workers whose devices or
    --communication differ would meet in collectives that cannot work.
    """
    _context().set_config_key_value(f"{name}/{cluster.rank}", text)
    return [_context().get_config_key_value(f"{name}/{rank}", int(timeout_s * 1000)) for rank in range(cluster.size)]


def wait_at_barrier(name: str, timeout_s: float) -> None:
    """Returns when all workers have called it, through the coordination service. Relies on `Context.wait_at_barrier`;
    without it a worker that ends first may take the others' last results with it. Raises tf.errors.OpError.
    """
    _context().wait_at_barrier(name, int(timeout_s * 1000))


def stop_watching_peers(strategy: Any) -> None:
    """Ends TensorFlow's thread that watches the other workers: it would report those that have left as lost. Relies on
    `_check_health_thread_should_stop` of the strategy's `extended`; if that is gone, the thread keeps running."""
    stop = getattr(strategy.extended, "_check_health_thread_should_stop", None)
    if stop is not None:
        stop.set()


def wait_until_computed(value: Any) -> None:
    """Returns when the result of a ClusterCoordinator has arrived; raises what its computation raised. Relies on
    `RemoteValueImpl._wait_and_maybe_error`; with `fetch` alone, errors of the computation and errors of the transfer
    back could not be told apart.
    """
    value._wait_and_maybe_error()
