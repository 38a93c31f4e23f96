"""The collectives of a runtime, each under a name, so that communication/measure.py can time them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfdist.runtime.collectives import Group

OUR_RING = "our ring"  # over TCP, and with --communication=auto through memory within a host


@dataclass(frozen=True)
class Collective:
    """A collective to be timed. Exactly one of `in_graph` and `on_host` is set."""

    through: str  # what carries the bytes
    # Takes a replica's tensor, float32 [k], inside the `fn` of `run`.
    in_graph: Callable[[tf.Tensor], tf.Tensor] | None = None
    # Takes an array, float32 [k], between steps.
    on_host: Callable[[np.ndarray], np.ndarray] | None = None


def of_group(group: Group) -> dict[str, Collective]:
    """TensorFlow's collective operations, as the mesh uses them."""
    through = through_tensorflow(group.nccl)
    return {
        "all_reduce": Collective(through, group.all_reduce),
        "all_gather": Collective(through, group.all_gather),
        "reduce_scatter": Collective(through, group.reduce_scatter),
        "all_to_all": Collective(through, lambda x: group.all_to_all(tf.reshape(x, [group.size, -1]))),
        "broadcast": Collective(through, lambda x: group.broadcast(x, group.ranks[0])),
    }


def through_tensorflow(nccl: bool) -> str:
    """The name of the transport of TensorFlow's own collectives."""
    return "TensorFlow, NCCL" if nccl else "TensorFlow, gRPC"
