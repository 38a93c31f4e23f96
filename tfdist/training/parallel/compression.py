"""Gradient compression: gradients travel between replicas in fewer bytes, with an error that may be carried over.

    --compression   a tensor of n float32 (4 n bytes) travels as          error
    fp16, bf16      2 n bytes, summed in that type                        rounding; not carried
    int8            n bytes and a scale per tensor                        carried
    topk            2 bytes for each of the n / 5 largest, n bits         carried
    powersgd        4 r (rows + columns) bytes, rank r = 8                carried

Carried (error feedback, Karimireddy et al. 2019, arXiv:1901.09847): the part of a gradient that a worker could not send
is kept and added to its next gradient, so that nothing is lost, only delayed. A skipped step leaves this state as it
was before. Top-k sparsification: Aji and Heafield 2017, arXiv:1704.05021. PowerSGD: Vogels et al. 2019,
arXiv:1905.13727: replaces the gradient, as a matrix M, by P Q^T, one step of power iteration that starts from the Q of
the previous step. Vectors (biases, norms) are sent whole under topk and powersgd: they are few, and matter.

Delayed gradients do harm while weights change fast, most of all where the optimizer divides by statistics of past
gradients. So topk and powersgd begin after --compression_after steps (PyTorch's hook for PowerSGD also uses 1000);
until then gradients are sent whole. Final losses of 2 workers (tests/multi/compression.py), with compression begun
after 40 and 100 steps:

                                       whole    fp16     bf16     int8     topk     without feedback   powersgd
    digits, momentum, 200 steps        0.1264   0.1264   0.1265   0.1263   0.1268   0.1376             0.1265
    text, adamw, 300 steps             2.2313   2.2313   2.2313   2.2285   2.2451   2.2728             2.2439

When compression began at once, with 4 + 4 bytes for each of the n / 10 largest, topk ended at 0.1284 and 2.507,
powersgd at 0.1266 and 2.328; a higher learning rate made that worse, not better.

float16 overflows easily: tensors are divided by the number of workers before the sum, which is multiplied by it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.artifacts.state import BASIS, CARRIED
from tfdist.runtime.collectives import Group

TOPK_PART = 0.2
POWERSGD_RANK = 8
_LEAST = 1024  # tensors of fewer elements travel whole under topk and powersgd
_ROUNDING = 1e-5  # of a column's length: what is left of it after the projections is float32's noise below that


class Compression:
    """A lossy sum over a group. `variables` is its state, which must be saved: each worker has its own.

    Args:
      kind: any choice of --compression except none.
      variables: of the model; the tensors of a call have their shapes and order.
      after: number of steps in which topk and powersgd leave gradients whole.
      feedback: False drops the error instead of carrying it on (for comparison only).
    """

    def __init__(self, kind: str, variables: Sequence[keras.Variable], group: Group, after: int, feedback: bool = True):
        self.kind, self.group, self.after = kind, group, after if kind in ("topk", "powersgd") else 0
        self.shapes = [tuple(variable.shape) for variable in variables]
        self.carries = feedback and kind in ("int8", "topk", "powersgd")
        self.variables: dict[str, tf.Variable] = {}
        for index, shape in enumerate(self.shapes):
            if self.carries and not self._whole(shape):
                self.variables[f"{CARRIED}{index:04d}"] = tf.Variable(tf.zeros(shape), trainable=False)
            if kind == "powersgd" and not self._whole(shape):
                # The same on all workers: their matrices must span the same space.
                start = np.random.default_rng(index).normal(size=(_matrix(shape)[1], POWERSGD_RANK)).astype("float32")
                self.variables[f"{BASIS}{index:04d}"] = tf.Variable(tf.constant(start), trainable=False)
        self._sum = {
            "fp16": self._cast,
            "bf16": self._cast,
            "int8": self._int8,
            "topk": self._topk,
            "powersgd": self._powersgd,
        }[kind]

    def bytes(self) -> int:
        """The bytes that one worker sends for one step's gradients, without the collective's own overhead."""
        total = 0
        for shape in self.shapes:
            n = math.prod(shape)
            rows, columns = _matrix(shape)
            total += (
                4 * n
                if self._whole(shape)
                else {
                    "fp16": 2 * n,
                    "bf16": 2 * n,
                    "int8": n + 4,
                    "topk": 2 * _kept(n) + 4 * _words(n),
                    "powersgd": 4 * POWERSGD_RANK * (rows + columns),
                }[self.kind]
            )
        return total

    def figures(self, steps: int) -> dict[str, float]:
        """Values for the log, after so many steps: the bytes that a worker has sent in the last one, the bytes without
        compression, and the norm of the error that it carries."""
        whole = 4.0 * sum(map(math.prod, self.shapes))
        found = {
            "compression/sent_bytes": whole if 0 < steps <= self.after else float(self.bytes()),
            "compression/whole_bytes": whole,
        }
        errors = [variable.value() for name, variable in self.variables.items() if "error" in name]
        return found | ({"compression/carried_norm": float(tf.linalg.global_norm(errors))} if errors else {})

    def __call__(self, tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], dict[str, tf.Tensor]]:
        """Returns (the approximate sum of each tensor over the group, bit for bit the same on every worker; the new
        values of `variables`, to be kept once the step is made)."""
        ends = self.unchanged()
        return [self._one(index, tensor, ends) for index, tensor in enumerate(tensors)], ends

    def unchanged(self) -> dict[str, tf.Tensor]:
        """The present values of `variables`."""
        return {name: tf.identity(variable) for name, variable in self.variables.items()}

    def keep(self, ends: Mapping[str, tf.Tensor]) -> None:
        """Sets `variables` to these values."""
        for name, end in ends.items():
            self.variables[name].assign(end)

    def _one(self, index: int, tensor: tf.Tensor, ends: dict[str, tf.Tensor]) -> tf.Tensor:
        if self._whole(self.shapes[index]):
            return self.group.all_reduce(tensor)
        dtype, tensor = tensor.dtype, tf.cast(tensor, tf.float32)
        error = f"{CARRIED}{index:04d}"
        wanted = tensor + ends[error] if error in ends else tensor
        total, sent = self._sum(index, wanted, ends)
        if error in ends:
            ends[error] = wanted - sent
        return tf.cast(total, dtype)

    def _whole(self, shape: tuple[int, ...]) -> bool:
        return self.kind in ("topk", "powersgd") and (math.prod(shape) < _LEAST or len(shape) < 2)

    # -- each takes (index, this worker's tensor, new values of `variables`) and returns (the sum over workers, this
    # worker's contribution to it)

    def _cast(self, index: int, tensor: tf.Tensor, ends: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        n = float(self.group.size)
        rounded = tf.cast(tensor / n, tf.float16 if self.kind == "fp16" else tf.bfloat16)
        return tf.cast(self.group.all_reduce(rounded), tf.float32) * n, tf.cast(rounded, tf.float32) * n

    def _int8(self, index: int, tensor: tf.Tensor, ends: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        scale = tf.maximum(tf.reduce_max(tf.abs(tensor)), 1e-30) / 127.0
        levels = tf.cast(tf.round(tensor / scale), tf.int8)
        scales = self.group.all_gather(scale[tf.newaxis])
        every = tf.cast(_gather_bytes(levels, math.prod(self.shapes[index]), self.group), tf.float32)
        total = tf.reduce_sum(every * scales[:, tf.newaxis], 0)
        return tf.reshape(total, tensor.shape), tf.cast(levels, tf.float32) * scale

    def _topk(self, index: int, tensor: tf.Tensor, ends: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        flat, n = tf.reshape(tensor, [-1]), math.prod(self.shapes[index])
        # NaN counts as the largest. Else top_k may leave it in the carried error, and the step passes as finite.
        sizes = tf.where(tf.math.is_nan(flat), math.inf, tf.abs(flat))
        _, places = tf.math.top_k(sizes, _kept(n), sorted=False)
        places = tf.sort(places)  # the order in which a mask lists them
        values = tf.cast(tf.gather(flat, places), tf.bfloat16)
        mask = tf.tensor_scatter_nd_update(
            tf.zeros([32 * _words(n)], tf.bool), places[:, tf.newaxis], tf.ones_like(places, tf.bool)
        )
        masks = _from_bits(tf.reshape(self.group.all_gather(_as_bits(mask)), [self.group.size, -1]))
        every_place = tf.reshape(
            tf.ensure_shape(tf.where(masks)[:, 1], [self.group.size * _kept(n)]), [self.group.size, -1, 1]
        )
        every_value = tf.reshape(tf.cast(self.group.all_gather(values), tf.float32), [self.group.size, -1])
        total = tf.zeros([n])
        # In turn: a GPU would add up repeated places in any order.
        for member in range(self.group.size):
            total = tf.tensor_scatter_nd_add(total, every_place[member], every_value[member])
        sent = tf.scatter_nd(places[:, tf.newaxis], tf.cast(values, tf.float32), [n])
        return tf.reshape(total, tensor.shape), tf.reshape(sent, tensor.shape)

    def _powersgd(self, index: int, tensor: tf.Tensor, ends: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        matrix = tf.reshape(tensor, _matrix(self.shapes[index]))
        basis = f"{BASIS}{index:04d}"
        p = _orthonormal(self.group.all_reduce(matrix @ ends[basis]))
        own_q = tf.matmul(matrix, p, transpose_a=True)
        q = self.group.all_reduce(own_q)
        # A column of zeros would find nothing ever again: its last direction stays for gradients of more rank.
        ends[basis] = tf.where(tf.reduce_any(tf.not_equal(q, 0.0), 0), q, ends[basis])
        return tf.reshape(tf.matmul(p, q, transpose_b=True), tensor.shape), tf.reshape(
            tf.matmul(p, own_q, transpose_b=True), tensor.shape
        )


def _kept(n: int) -> int:
    return max(1, round(n * TOPK_PART))


def _words(n: int) -> int:
    """The number of 32-bit words for a mask of n bits."""
    return -(-n // 32)


def _as_bits(mask: tf.Tensor) -> tf.Tensor:
    """Packs a mask into words: bool [32 w] -> int32 [w]."""
    return tf.reduce_sum(tf.bitwise.left_shift(tf.cast(tf.reshape(mask, [-1, 32]), tf.int32), tf.range(32)), 1)


def _from_bits(words: tf.Tensor) -> tf.Tensor:
    """Unpacks words into masks: int32 [m, w] -> bool [m, 32 w]."""
    bits = tf.bitwise.bitwise_and(tf.bitwise.right_shift(tf.expand_dims(words, -1), tf.range(32)), 1)
    return tf.reshape(bits > 0, [words.shape[0], -1])


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """The tensor as a matrix: all dims but the last are rows."""
    return math.prod(shape[:-1]), shape[-1] if len(shape) else 1


def _orthonormal(p: tf.Tensor) -> tf.Tensor:
    """Columns [rows, r] made orthonormal by Gram and Schmidt, twice for accuracy. A column that depends on those before
    it becomes 0: the rounding that is left of it lies in their span, and would count a second time what they hold."""
    for _ in range(2):
        columns: list[tf.Tensor] = []
        for whole in tf.unstack(p, axis=1):
            column = whole
            for earlier in columns:
                column -= tf.tensordot(earlier, column, 1) * earlier
            left, before = tf.reduce_sum(column**2), tf.reduce_sum(whole**2)
            unit = column * tf.math.rsqrt(tf.maximum(left, 1e-30))
            columns.append(tf.where(left <= _ROUNDING**2 * before, 0.0, unit))  # NaN stays, and is found
        p = tf.stack(columns, 1)
    return p


def _gather_bytes(levels: tf.Tensor, n: int, group: Group) -> tf.Tensor:
    """int8 [members, n] of every member's tensor of n elements.

    The collectives do not support int8: four elements travel as one int32.
    """
    flat = tf.reshape(levels, [-1])
    words = tf.bitcast(tf.reshape(tf.pad(flat, [[0, -n % 4]]), [-1, 4]), tf.int32)
    rows = tf.reshape(group.all_gather(words), [group.size, -1])
    return tf.reshape(tf.bitcast(rows, tf.int8), [group.size, -1])[:, :n]
