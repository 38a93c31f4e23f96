"""The common part of all runtimes whose workers hold one replica each: a per-replica value is just the value.

A file with a strategy's entry may import this module. Such a file is read before TensorFlow is set up, so TensorFlow is
not imported here before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.runtime.defaults import RuntimeDefaults

if TYPE_CHECKING:
    import tensorflow as tf


class SingleReplica(RuntimeDefaults):
    """A base class; runtime/base.py documents each method."""

    local_replicas = 1
    first_replica: int

    def run(self, fn: Callable, args: Sequence = ()) -> Any:
        return fn(*args)

    def per_replica(self, values: Sequence) -> Any:
        (value,) = values
        return value

    def local(self, value: Any) -> tuple:
        return (value,)

    def replica_id(self) -> tf.Tensor:
        import tensorflow as tf

        return tf.constant(self.first_replica)

    def assign(self, variable: tf.Variable, value: tf.Tensor) -> None:
        variable.assign(value)
