"""Models of random operations, for test_row_proof.py: most of them mix the rows of their batch in some way."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

TOKENS, WIDTH, VOCABULARY = 3, 4, 5
Draw = Callable[..., int]


class Program(keras.layers.Layer):
    """Applies random operations, drawn from `seed`, to the results of earlier ones. The choice depends on shapes, not
    on values. x: [B, TOKENS, WIDTH] -> the result of the last operation."""

    def __init__(self, seed: int, length: int = 6):
        super().__init__()
        self.seed, self.length = seed, length

    def build(self, shape):
        self.table = self.add_weight(shape=(VOCABULARY, WIDTH), name="table")
        self.kernel = self.add_weight(shape=(WIDTH, WIDTH), name="kernel")

    def call(self, x):
        random = np.random.default_rng(self.seed)
        made = [x, tf.cast(tf.abs(x) * 3, tf.int32) % VOCABULARY, tf.convert_to_tensor(self.kernel)]
        for _ in range(self.length):
            made.append(self.operation(random, made, tf.shape(x)[0], x.shape[0]))
        return made[-1]

    def operation(self, random, made, count, rows):
        """Returns the result of one more operation; of one that does not fit its inputs, the first input."""
        choose = lambda values: values[random.integers(len(values))]  # noqa: E731
        # The last result is used more often: else most results would be lost.
        x, y = made[-1] if random.random() < 0.7 else choose(made), choose(made)
        name = choose(list(OPERATIONS))
        given = random.integers(0, 2**31, 8)
        try:
            return OPERATIONS[name](self, x, y, [int(number) for number in given], count, rows)
        except Exception:  # noqa: BLE001 - shapes or types do not fit
            return x


def axis(x, number):
    return number % len(x.shape)


def floats(x):
    return tf.cast(x, tf.float32)


def of_rank_3(x):
    """Raises ValueError for other ranks: TensorFlow ends the process if a convolution has fewer dims."""
    if len(x.shape) != 3:
        raise ValueError
    return floats(x)


def reshaped(layer, x, y, n, count, rows):
    shapes = [
        lambda: (-1,),
        lambda: (rows, -1),
        lambda: (count, -1),
        lambda: (1, rows, -1),
        lambda: (rows * x.shape[1], -1),
        lambda: (rows // 2, -1),
        lambda: (x.shape[0], *x.shape[2:], x.shape[1]),
        lambda: (rows, 2, -1),
        lambda: (-1, WIDTH),
        lambda: (-1, 2),
        lambda: (2, -1),
        lambda: (*x.shape[:1], -1, x.shape[-1]),
        lambda: (TOKENS, -1, WIDTH),
        lambda: (*x.shape[1:], -1),
    ]
    return tf.reshape(x, shapes[n[0] % len(shapes)]())


def sliced(layer, x, y, n, count, rows):
    pieces = [slice(None), slice(1, None), slice(None, -1), slice(None, None, -1), 0, -1, slice(0, 2), slice(0, rows)]
    more = [tf.newaxis, Ellipsis]
    chosen = [(pieces + more)[number % len(pieces + more)] for number in n[: 1 + n[7] % 3]]
    return x[tuple(chosen)]


def gathered(layer, x, y, n, count, rows):
    return tf.gather(x, tf.abs(y) % x.shape[axis(x, n[0])], axis=axis(x, n[0]), batch_dims=n[1] % 2)


def einsum(layer, x, y, n, count, rows):
    equations = ["abc,abc->abc", "abc,cd->abd", "abc,adc->abd", "abc,dbc->ad", "abc->acb", "abc->ab", "abc->bc"]
    equations += ["ab,cb->ac", "ab,bc->ac", "ab,ab->a", "ab->ba", "abc,dc->adb", "abc,adc->bad", "abb->a", "abcd->adcb"]
    fitting = [each for each in equations if len(each.split("->")[0].split(",")[0]) == len(x.shape)]
    equation = fitting[n[0] % len(fitting)]
    return tf.einsum(equation, *([floats(x), floats(y)] if "," in equation else [floats(x)]))


def of_rows(layer, x, y, n, count, rows):
    """Returns a tensor that depends on the number of rows."""
    kinds = [
        lambda: tf.ones([count, 1]),
        lambda: tf.zeros([rows, TOKENS, WIDTH]),
        lambda: floats(tf.range(count)),
        lambda: floats(count),
        lambda: tf.broadcast_to(layer.kernel, [count, WIDTH, WIDTH]),
        lambda: tf.tile(layer.kernel[None], [count, 1, 1]),
        lambda: tf.tile(layer.kernel[:1], [rows, 1]),
        lambda: tf.tile(layer.kernel, [rows, 1]),
        lambda: tf.fill([rows, 1], 1.0 / rows),
        lambda: tf.eye(rows),
        lambda: layer.kernel[:rows],
    ]
    return kinds[n[0] % len(kinds)]()


OPERATIONS = {
    "unary": lambda layer, x, y, n, *_: [tf.tanh, tf.abs, tf.sign, tf.nn.relu, tf.zeros_like][n[0] % 5](floats(x)),
    "leaky": lambda layer, x, y, n, count, rows: tf.nn.leaky_relu(floats(x), 1 / rows if n[0] % 2 else 0.3),
    "gelu": lambda layer, x, y, n, *_: tf.nn.silu(floats(x)) if n[0] % 2 else tf.nn.gelu(floats(x)),
    "binary": lambda layer, x, y, n, *_: [tf.add, tf.multiply, tf.maximum, tf.subtract][n[0] % 4](floats(x), floats(y)),
    "binary ": lambda layer, x, y, n, *_: tf.add(floats(x), floats(y)),
    "where": lambda layer, x, y, n, *_: tf.where(floats(y) > 0.1, floats(x), 0.5),
    "reduce": lambda layer, x, y, n, *_: [tf.reduce_mean, tf.reduce_max, tf.reduce_sum, tf.reduce_prod][n[0] % 4](
        floats(x), axis=axis(x, n[1]) if n[2] % 3 else [axis(x, n[1]), axis(x, n[1] + 1)], keepdims=n[4] % 2 > 0
    ),
    "transpose": lambda layer, x, y, n, *_: tf.transpose(x, np.random.default_rng(n[0]).permutation(len(x.shape))),
    "reshape": reshaped,
    "reshape ": reshaped,
    "matmul": lambda layer, x, y, n, *_: tf.matmul(
        floats(x), floats(y), transpose_a=n[0] % 2 > 0, transpose_b=n[1] % 2 > 0
    ),
    "dense": lambda layer, x, y, n, *_: tf.tensordot(floats(x), layer.kernel, 1),
    "einsum": einsum,
    "gather": gathered,
    "lookup": lambda layer, x, y, n, *_: tf.gather(layer.table, x % VOCABULARY),
    "gather_nd": lambda layer, x, y, n, *_: tf.gather_nd(layer.table, x[..., :1] % VOCABULARY),
    "concat": lambda layer, x, y, n, *_: tf.concat([floats(x), floats(y)], axis(x, n[0])),
    "stack": lambda layer, x, y, n, *_: tf.stack([floats(x), floats(y)], axis(x, n[0])),
    "unstack": lambda layer, x, y, n, *_: tf.unstack(x, axis=axis(x, n[0]))[n[1] % 2],
    "split": lambda layer, x, y, n, *_: tf.split(x, 2, axis=axis(x, n[0]))[n[1] % 2],
    "slice": sliced,
    "slice ": sliced,
    "sliced": lambda layer, x, y, n, *_: tf.slice(x, [0] * len(x.shape), [-1] * (len(x.shape) - 1) + [1 + n[0] % 3]),
    "pad": lambda layer, x, y, n, *_: tf.pad(x, [[int(n[at] % 5 == 0), 0] for at in range(len(x.shape))]),
    "tile": lambda layer, x, y, n, *_: tf.tile(x, [1 + int(n[at] % 4 == 0) for at in range(len(x.shape))]),
    "softmax": lambda layer, x, y, n, *_: tf.nn.softmax(floats(x), axis=axis(x, n[0])),
    "cumsum": lambda layer, x, y, n, *_: tf.cumsum(floats(x), axis(x, n[0])),
    "reverse": lambda layer, x, y, n, *_: tf.reverse(x, [axis(x, n[0])]),
    "roll": lambda layer, x, y, n, *_: tf.roll(x, 1, axis(x, n[0])),
    "argmax": lambda layer, x, y, n, *_: tf.argmax(x, axis(x, n[0]), output_type=tf.int32),
    "one_hot": lambda layer, x, y, n, *_: tf.one_hot(tf.cast(x, tf.int32), 3, axis=n[0] % (len(x.shape) + 1)),
    "expand": lambda layer, x, y, n, *_: tf.expand_dims(x, n[0] % (len(x.shape) + 1)),
    "squeeze": lambda layer, x, y, n, *_: tf.squeeze(x),
    "band": lambda layer, x, y, n, *_: tf.linalg.band_part(floats(x), -1, 0),
    "diagonal": lambda layer, x, y, n, *_: tf.linalg.diag_part(floats(x)) if n[0] % 2 else tf.linalg.diag(floats(x)),
    "top": lambda layer, x, y, n, *_: tf.math.top_k(floats(x), 2)[n[0] % 2],
    "pool": lambda layer, x, y, n, *_: tf.nn.max_pool1d(of_rank_3(x), 2, 1, "SAME"),
    "convolution": lambda layer, x, y, n, *_: tf.nn.conv1d(of_rank_3(x), layer.kernel[None], 1, "SAME"),
    "rows": of_rows,
    "rows ": of_rows,
    "broadcast": lambda layer, x, y, n, count, rows: tf.broadcast_to(x, tf.concat([[count], tf.shape(x)[1:]], 0)),
    "sizes": lambda layer, x, y, n, count, rows: floats(x) * floats(count) if n[0] % 2 else floats(x) / rows,
}
