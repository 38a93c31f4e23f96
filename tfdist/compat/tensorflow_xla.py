"""Parts of XLA to which TensorFlow gives no public name (TensorFlow 2.21)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.ops import control_flow_util


def is_compiled_by_xla() -> bool:
    """Whether what is being traced is a function, or part of one, with jit_compile=True. Relies on tensorflow.python's
    `GraphOrParentsInXlaContext`; without it attention is never cuDNN's.
    """
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def custom_call(
    target: str, operands: Sequence[tf.Tensor], config: str, results: Sequence[tuple[tf.DType, Sequence[int]]]
) -> list[tf.Tensor]:
    """The results of XLA's custom call `target` for the operands: tensors of these dtypes and static shapes. It reads
    `config` as its own. Only in a function that XLA compiles.

    Relies on the operation XlaCustomCallV2; without it XLA's own cuDNN kernels cannot be asked for.
    """
    found: Any = gen_xla_ops.xla_custom_call_v2(
        operands,
        call_target_name=target,
        backend_config=config,
        has_side_effect=False,
        result_dtypes=[dtype for dtype, _ in results],
        result_shapes=[list(shape) for _, shape in results],
    )
    return list(found)
