"""The Runtime protocol: all that the rooms above know about devices and other workers.

A *worker* is a process, a *replica* a copy of the model; a worker holds one or more replicas. A per-replica value is
one value per replica of this worker; with one replica it is just the value. A new runtime implements this protocol in
a file of its own, inherits what suits it from RuntimeDefaults (defaults.py), and adds an entry to
config/strategies.py; tests/multi runs one conformance suite over all of them. Its class has a constructor
`create(config, cluster)`, which meets the other workers. Others may still probe this worker's address meanwhile, and
somebody else may answer at theirs (control/preflight.py): who connects must say who it is, and be answered.
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
    """Runs code on replicas, and combines values over them."""

    name: str
    rank: int  # of this worker; 0 is the chief
    size: int  # workers
    replicas: int  # over all workers
    local_replicas: int  # of this worker
    first_replica: int  # global index of this worker's first replica
    # False where another worker, which holds another part of the same replica, already counts these samples
    counts_samples: bool

    # What it can do. What must be known before TensorFlow is imported is in config/strategies.py.

    holds_whole_model: bool  # whether a worker's graph has all of a replica's model
    compiles_updates: bool  # whether XLA may compile what `run` does to variables
    sums_slices: bool  # whether `all_reduce` takes tf.IndexedSlices
    compute_workers: int  # other processes that share the batch of a replica; 1: it is computed here

    @property
    def mesh(self) -> Mesh | None:
        """The named axes of its workers; None: it knows replicas only."""

    # Inside a tf.function.

    def scope(self) -> AbstractContextManager:
        """Variables created inside exist on every replica, with the chief's initial values (first_values.py)."""
        ...

    def run(self, fn: Callable, args: Sequence = ()) -> Any:
        """Calls `fn(*args)` once per local replica; per-replica arguments are unpacked, results are per-replica."""
        ...

    def per_replica(self, values: Sequence) -> Any:
        """Makes one per-replica value of `local_replicas` values."""
        ...

    def local(self, value: Any) -> tuple:
        """The inverse of `per_replica`: the local replicas' values."""
        ...

    def batch_devices(self) -> Sequence[str]:
        """The device of each local replica, onto which its batches are brought while the one before is computed; none:
        the step copies them."""
        ...

    def order_tokens(self) -> Sequence[tf.Variable]:
        """Variables that its collectives set in each step to keep their order, which no snapshot has to hold."""
        ...

    def replica_id(self) -> tf.Tensor:
        """The global index of the replica, int32 []. To be called inside the `fn` of `run`."""
        ...

    def all_reduce(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[Any]:
        """Inside the `fn` of `run`: the sum of each tensor over all replicas, of its own kind. Every replica passes the
        same shapes. Of several in one graph TensorFlow may run either first: all workers must run them in one order.

        Of tf.IndexedSlices with values of a static shape (if `sums_slices`) the sum is the slices of all replicas,
        one after the other: a row may be there several times. bfloat16, if the strategy knows --compression=bf16,
        travels in two bytes an element, and may come back as float32.
        """
        ...

    def gather_row(self, row: tf.Tensor) -> tf.Tensor:
        """The row [k] of every replica: [replicas, k], float32 or float64, in one order on all. To be called inside the
        `fn` of `run`. Its gradient is the gradient of the sum of all replicas' losses. For rows of a few thousand
        elements."""
        ...

    def assign(self, variable: tf.Variable, value: Any) -> None:
        """Sets every local replica's copy of the variable to its own value of a per-replica value; outside of `run`."""
        ...

    # Between steps, on host values. Every worker must call these in the same order.

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """[size, *array.shape]: every worker's array (same shape and dtype on all)."""
        ...

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """The chief's arrays, bit for bit, on every worker (same shapes and dtypes on all)."""
        ...

    def broadcast_object(self, value: Any, name: str = "broadcast") -> Any:
        """The chief's value (of a kind that encoding.py knows) on every worker; the others' values do not count.

        name: for the sentence about what could not be read. Raises ConfigError on all workers for another kind.
        """
        ...

    def barrier(self) -> None:
        """Returns when every worker has called it."""
        ...

    def waiting_for(self) -> int | None:
        """The rank whose data this worker waits for at the moment; None: nobody's, or not known.

        May be called from another thread.
        """
        ...

    def reduction_s(self) -> tuple[float, float] | None:
        """Seconds so far in which gradients travelled, and in which nothing else was left to do but to wait for them;
        None: not known.
        """
        ...

    def gradient_path(self) -> GradientPath | None:
        """The way of gradients between workers, where tfdist's own code sees to it."""
        ...

    def collectives(self) -> dict[str, Collective]:
        """name -> collective over all workers' replicas, to be measured; none if workers do not talk to each other.

        The same on every worker; the call itself may be a collective.
        """
        ...

    def close(self) -> None:
        """Leaves the cluster in order."""
        ...


class PeerRuntime(Runtime, Protocol):
    """The methods that tfdist.fit and its kin need of the runtime beneath them, beyond the protocol of all."""

    cluster: Cluster

    def gather(
        self, tensors: Sequence[tf.Tensor], same: Sequence[tf.Tensor] = (), stamp: Callable[[], int] = ...
    ) -> list[tf.Tensor]:
        """The rows of every worker, bit for bit: [n_r, ...] on worker r -> [sum of n_r, ...], of any numeric type.

        Without a gradient. All gathers of one graph run in the order in which they were traced, the same everywhere.
        same: tensors that must be equal on all workers, or that is an error; floating ones but for rounding.
        stamp: gives, each time that the gather runs, a number that must be the same on all workers as well.
        """
        ...

    def agree_on(self, call: str) -> None:
        """Raises ConfigError if not all workers are about to do the same; otherwise returns when all are."""
        ...

    def end_call(self) -> None:
        """Waits after a call that all workers make together, until this worker may go on, or come to its end."""
        ...

    def leave(self) -> None:
        """Says that this script has come to its end, for those who still wait for this worker."""
        ...
