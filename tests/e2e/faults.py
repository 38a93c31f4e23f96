"""Models that break a run, given to tfdist as `tests.e2e.faults:NAME`."""

from __future__ import annotations

import keras

from tfdist.models.mlp import mlp
from tfdist.runtime.horovod import Horovod
from tfdist.runtime.mirrored import MultiWorker


def unreduced_on_rank_1(x_spec, num_outputs: int) -> keras.Model:
    """The mlp; rank 1 takes part in every reduction, and then goes on with its own gradients."""
    for kind in (Horovod, MultiWorker):
        def all_reduce(self, tensors, reduce=kind.all_reduce):
            reduced = reduce(self, tensors)
            if self.rank != 1 or len(tensors) < 2:
                return reduced
            return [tensor + 0.0 * other for tensor, other in zip(tensors[:-1], reduced[:-1], strict=True)] + reduced[-1:]

        kind.all_reduce = all_reduce
    return mlp(x_spec=x_spec, num_outputs=num_outputs, widths=(16,))
