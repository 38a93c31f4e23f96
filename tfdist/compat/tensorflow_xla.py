"""Parts of XLA to which TensorFlow gives no public name (TensorFlow 2.21)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.ops import control_flow_util


def is_compiled_by_xla() -> bool:
    """Whether the code being traced is in a function with jit_compile=True. Relies on tensorflow.python's
    `GraphOrParentsInXlaContext`; without it attention never uses cuDNN.
    """
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def custom_call(
    target: str, operands: Sequence[tf.Tensor], config: str, results: Sequence[tuple[tf.DType, Sequence[int]]]
) -> list[tf.Tensor]:
    """Calls XLA's custom call `target` on the operands. Returns tensors of these dtypes and static shapes. config: is
    interpreted by the target. Works only in a function that XLA compiles.

    Relies on the operation XlaCustomCallV2; without it XLA's own cuDNN kernels cannot be requested.
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
