"""One worker of the audit of tfdist.fit: traces steps as if on a GPU, and writes what it found. It computes no step.

    python -m tests.gpu.fit_worker OUT_DIR [ROW;ROW]

Writes OUT_DIR/ROW-RANK.json: the audit, and the collectives in the order in which they are launched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock


def main(out: Path, chosen: list[str]) -> None:
    import keras

    import tfdist
    from tests.gpu.combinations import HOST, as_on_gpu
    from tests.gpu.graph_audit import audit
    from tests.parity import lean
    from tfdist.runtime.launch_order import recorded

    lean.prepare()
    runtime: Any = tfdist.init(communication="ring", collective_timeout=120.0)
    runtime._nccl = runtime._group.nccl = runtime._rows._group.nccl = True  # as where tensors are on GPUs
    for name, make in _rows().items():
        if chosen and name not in chosen:
            continue
        lean.next_model()
        try:
            with as_on_gpu(), _traced_only() as traced, recorded() as launches, contextlib.suppress(_Traced):
                model, x, y = make()
                tfdist.fit(model, x, y, batch_size=64, verbose=0, shuffle=False)
        finally:
            keras.config.set_dtype_policy("float32")
        report = {"audit": dataclasses.asdict(audit(traced[0], HOST)), "launches": launches}
        (out / f"{name}-{runtime.rank}.json").write_text(json.dumps(report))
        runtime.barrier()
    print("audit: done", flush=True)


class _Traced(Exception):
    """Ends a fit before it computes a step."""


@contextlib.contextmanager
def _traced_only() -> Iterator[list]:
    """Yields a list that gets the traced function of the first step, which then raises _Traced."""
    import tensorflow as tf

    make, found = tf.function, []

    class Step:
        def __init__(self, function: Any):
            self._function = function

        def get_concrete_function(self, *specs: Any) -> None:
            found.append(self._function.get_concrete_function(*specs))
            raise _Traced

        __call__ = get_concrete_function

    def function(python: Any = None, **options: Any) -> Any:
        made = make(python, **options)
        return Step(made) if getattr(python, "__name__", "") == "one_step" else made

    with mock.patch.object(tf, "function", function):
        yield found


def _rows() -> dict[str, Callable[[], tuple]]:
    """name -> (compiled model, inputs, labels), for one batch of 64."""
    import keras
    import numpy as np
    from keras import layers

    def compiled(model: keras.Model, **options: Any) -> keras.Model:
        model.compile(
            keras.optimizers.Adam(1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)],
            **{"jit_compile": False, **options},
        )
        return model

    def cnn(policy: str, **options: Any) -> tuple:
        keras.config.set_dtype_policy(policy)
        stack = [keras.Input((32, 32, 3)), layers.Conv2D(32, 3, padding="same"), layers.BatchNormalization()]
        stack += [layers.ReLU(), layers.Dropout(0.1), layers.GlobalAveragePooling2D()]
        model = compiled(keras.Sequential([*stack, layers.Dense(1000, dtype="float32")]), **options)
        return model, np.zeros([64, 32, 32, 3], "float32"), np.zeros([64], "int64")

    def text(policy: str, outputs: int = 1000) -> tuple:
        keras.config.set_dtype_policy(policy)
        x = keras.Input((32,), dtype="int32")
        hidden = layers.Embedding(1000, 64)(x) + layers.Embedding(32, 64)(keras.ops.arange(32))
        hidden = layers.Dropout(0.1)(layers.LayerNormalization()(hidden))
        if outputs == 1000:
            hidden = layers.GlobalAveragePooling1D()(hidden)
        model = compiled(keras.Model(x, layers.Dense(outputs, dtype="float32")(hidden)))
        return model, np.zeros([64, 32], "int32"), np.zeros([64] if outputs == 1000 else [64, 32], "int64")

    return {
        "cnn, float32": lambda: cnn("float32"),
        "cnn, mixed_float16": lambda: cnn("mixed_float16"),
        "cnn, mixed_bfloat16": lambda: cnn("mixed_bfloat16"),
        "text, float32": lambda: text("float32"),
        "text, mixed_bfloat16": lambda: text("mixed_bfloat16"),
        "own rows, float32": lambda: text("float32", 4000),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(";") if len(sys.argv) > 2 else [])
