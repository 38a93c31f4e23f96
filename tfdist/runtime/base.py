"""The Runtime protocol: all that the packages above know about devices and other workers.

A *worker* is a process; a *replica* is a copy of the model; a worker holds one or more replicas. A per-replica value
consists of one value per replica of this worker; with one replica it is just that value.

A new runtime implements this protocol in a file of its own, inherits suitable defaults from RuntimeDefaults
(defaults.py), and adds an entry to config/strategies.py; tests/multi runs one conformance suite over all runtimes. Its
class has a constructor `create(config, cluster)`, which connects to the other workers. Meanwhile others may still probe
this worker's address, and a stranger may answer at theirs (control/preflight.py): a worker that connects must identify
itself and wait for an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from tfdist.control.cluster import Cluster
    from tfdist.runtime.all_reduce_choice import GradientPath
    from tfdist.runtime.mesh import Mesh
    from tfdist.runtime.operations import Collective


class Runtime(Protocol):
    """Runs code on replicas and combines values over them."""

    name: str
    rank: int  # of this worker; 0 is the chief
    size: int  # workers
    replicas: int  # over all workers
    local_replicas: int  # of this worker
    first_replica: int  # global index of this worker's first replica
    # False where another worker, which holds another part of the same replica, already counts these samples.
    counts_samples: bool

    # Capabilities. Those that must be known before TensorFlow is imported are in config/strategies.py.

    holds_whole_model: bool  # whether a worker's graph contains the whole model of a replica
    compiles_updates: bool  # whether XLA may compile the updates of variables in `run`
    sums_slices: bool  # whether `all_reduce` takes tf.IndexedSlices
    compute_workers: int  # number of other processes that share the batch of a replica; 1: it is computed here

    @property
    def mesh(self) -> Mesh | None:
        """The named axes of the workers; None if the runtime knows replicas only."""

    # Inside a tf.function.

    def scope(self) -> AbstractContextManager:
        """Variables created inside exist on every replica, with the chief's initial values (first_values.py)."""
        ...

    def run(self, fn: Callable, args: Sequence = ()) -> Any:
        """Calls `fn(*args)` once per local replica; unpacks per-replica arguments and returns per-replica results."""
        ...

    def per_replica(self, values: Sequence) -> Any:
        """Makes one per-replica value from `local_replicas` values."""
        ...

    def local(self, value: Any) -> tuple:
        """The inverse of `per_replica`: the local replicas' values."""
        ...

    def batch_devices(self) -> Sequence[str]:
        """The device of each local replica, to which its batches are copied while the previous batch is computed.
        Empty: the step copies the batches."""
        ...

    def order_tokens(self) -> Sequence[tf.Variable]:
        """Variables that the collectives set in each step to keep their order; a snapshot need not contain them."""
        ...

    def replica_id(self) -> tf.Tensor:
        """The global index of the replica, int32 []. To be called inside the `fn` of `run`."""
        ...

    def all_reduce(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[Any]:
        """Returns the sum of each tensor over all replicas, of the same kind and type. Call it inside the `fn` of
        `run`. Every replica passes the same shapes. TensorFlow may run several all-reduces of one graph in any order:
        all workers must run them in the same order.

        The sum of tf.IndexedSlices with values of a static shape (if `sums_slices`) is the slices of all replicas,
        concatenated: a row may occur several times. bfloat16, if the strategy knows --compression=bf16, travels in two
        bytes per element.
        """
        ...

    def gather_row(self, row: tf.Tensor) -> tf.Tensor:
        """Gathers the row [k] of every replica: [replicas, k], float32 or float64, in the same order on all replicas.
        Call it inside the `fn` of `run`. Its gradient is the gradient of the sum of all replicas' losses. For rows of
        up to a few thousand elements."""
        ...

    def assign(self, variable: tf.Variable, value: Any) -> None:
        """Sets each local replica's copy of the variable to that replica's element of `value`; outside of `run`."""
        ...

    # Between steps, on host values. Every worker must call these in the same order.

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """[size, *array.shape]: every worker's array (same shape and dtype on all)."""
        ...

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the chief's arrays, bit for bit, on every worker (same shapes and dtypes on all)."""
        ...

    def broadcast_object(self, value: Any, name: str = "broadcast") -> Any:
        """Returns the chief's value (of a type that encoding.py knows) on every worker; other values are ignored.

        name: names the value in the message if it could not be read. Raises ConfigError on all workers for other types.
        """
        ...

    def barrier(self) -> None:
        """Returns when every worker has called it."""
        ...

    def waiting_for(self) -> int | None:
        """The rank whose data this worker waits for at the moment; None if it waits for nobody, or if it is not known.

        May be called from another thread.
        """
        ...

    def reduction_s(self) -> tuple[float, float] | None:
        """(seconds so far in which gradients travelled, seconds so far in which the step could only wait for them);
        None if not known.
        """
        ...

    def gradient_path(self) -> GradientPath | None:
        """How gradients travel between workers, where tfdist's own code handles that."""
        ...

    def collectives(self) -> dict[str, Collective]:
        """name -> collective over all workers' replicas, to be measured; empty if workers do not talk to each other.

        The same on every worker; this method itself may be a collective call.
        """
        ...

    def close(self) -> None:
        """Leaves the cluster in an orderly way."""
        ...


class PeerRuntime(Runtime, Protocol):
    """What tfdist.fit and related calls need of a runtime in addition to the Runtime protocol."""

    cluster: Cluster

    def gather(
        self, tensors: Sequence[tf.Tensor], same: Sequence[tf.Tensor] = (), stamp: Callable[[], int] = ...
    ) -> list[tf.Tensor]:
        """Gathers all workers' rows, bit for bit: [n_r, ...] on worker r -> [sum of n_r, ...], of any numeric type.

        Has no gradient. All gathers of one graph run in the order in which they were traced, the same on all workers.
        same: tensors that must be equal on all workers (floating-point ones up to rounding), else it is an error.
        stamp: called each time that the gather runs; gives a number that must also be the same on all workers.
        """
        ...

    def agree_on(self, call: str) -> None:
        """Returns when all workers are about to make the same call. Raises ConfigError if their calls differ."""
        ...

    def end_call(self) -> None:
        """Waits, after a call that all workers make together, until this worker may continue or exit."""
        ...

    def leave(self) -> None:
        """Tells the workers that still wait for this one that its script has ended."""
        ...
