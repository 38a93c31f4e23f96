"""What TensorFlow's context and its strategies do for a cluster of workers without a public name (TensorFlow 2.21)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context


def _context() -> Any:
    """The process's one context, which TensorFlow makes when it is first asked."""
    return context.context()


def configure_coordination_service(leader: str, heartbeat_s: float, register_s: float) -> None:
    """Before a multi-worker strategy is made: which task ("/job:worker/replica:0/task:0") hosts the service that
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
    """TensorFlow's thread that looks after the other workers ends: it would report those who have left as lost. Relies
    on `_check_health_thread_should_stop` of the strategy's `extended`; if that is gone, the thread goes on.
    """
    stop = getattr(strategy.extended, "_check_health_thread_should_stop", None)
    if stop is not None:
        stop.set()


def wait_until_computed(value: Any) -> None:
    """Returns when a ClusterCoordinator's result is there, and raises what its computation raised. Relies on
    `RemoteValueImpl._wait_and_maybe_error`; with `fetch` alone, errors of the computation and of the way back could not
    be told apart.
    """
    value._wait_and_maybe_error()
