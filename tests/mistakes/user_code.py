"""Mistakes in a user's modules: data, model, objective, augmentation."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.mistakes.mistake import ANY, CONFIG, DATA, DIVERGED, OK, UNSUPPORTED, Mistake, one
from tests.mistakes.modules import AUGMENT, HEAD, MINE, MODEL, OBJECT, OBJECTIVE, STREAM, TRAIN
from tests.mistakes.modules import DATA as DATA_SOURCE

WRONG = CONFIG | DATA


@dataclass(frozen=True)
class Part:
    """A function of mine.py: its text, the flags that use it, and the words that name it."""

    text: str
    flags: tuple[str, ...]
    names: tuple[str, ...]


PARTS = {
    "data": Part(DATA_SOURCE, (), ("mine:data",)),
    "object": Part(OBJECT, ("--source=mine:Items", "--model_args=widths=(8,),num_outputs=3"), ("mine:Items",)),
    "stream": Part(STREAM, ("--source=mine:stream", "--model_args=widths=(8,),num_outputs=3"), ("mine:stream",)),
    "model": Part(MODEL, ("--model=mine:model", "--model_args="), ("--model=mine:model", "mine:model")),
    "objective": Part(OBJECTIVE, ("--objective=mine:objective",), ("--objective=mine:objective", "mine:objective")),
    "augment": Part(AUGMENT, ("--augment=mine:augment",), ("--augment", "mine:augment")),
}
RETURN_DATA = "    return x, y"
_OBJECT_END = "        return self.x[index], self.y[index]"
_STREAM_END = "tf.data.Dataset.from_tensor_slices(data(split))"
_LAST_LAYER = "keras.layers.Dense(num_outputs or 3)])"
# part -> (old text, new text, how it may end)
CHANGES: dict[str, tuple[tuple[str, str, frozenset[int]], ...]] = {
    "data": (
        tuple(
            (RETURN_DATA, new, codes)
            for new, codes in (
                ("    return x", WRONG),
                ("    return None", WRONG),
                ("    pass", WRONG),
                ("    return y", WRONG),
                ("    return x, y, y, y", WRONG),
                ("    return [x, y]", WRONG),
                ("    return {'x': x, 'y': y}", WRONG),
                ("    return iter([(x, y)])", WRONG),
                ("    return (row for row in x)", WRONG),
                ("    return x, y[:5]", WRONG),
                ("    return x[:0], y[:0]", DATA),
                ("    return x[0], y[0]", WRONG),
                ("    return x, np.eye(3)[y]", ANY),
                ("    return x, y + 1", OK),
                ("    return x, y - 1", WRONG),
                ("    return x, y.astype('float32') * np.nan", DIVERGED | WRONG),
                ("    return x * np.nan, y", DIVERGED),
                ("    return x * np.inf, y", DIVERGED),
                ("    return x.astype(str), y", WRONG),
                ("    return x.astype(object), y", ANY),
                ("    return x, y.astype(str)", WRONG),
                ("    return x.astype(complex), y", ANY),
                ("    return list(x), list(y)", ANY),
                ("    return x, list(map(str, y))", WRONG),
                ("    return [[1], [2, 3]], [0, 1]", WRONG),
                ("    return x, y, np.ones(7)", WRONG),
                ("    return x, y, -np.ones(len(y))", ANY),
                ("    return x, y, np.zeros(len(y))", ANY),
                ("    return x, y, np.full(len(y), np.nan)", ANY),
                ("    return x, y, ['a'] * len(y)", WRONG),
                ("    return x, y, np.ones((len(y), 2))", WRONG),
                ("    return x.astype('int64'), y", ANY),
                ("    return x > 0, y", ANY),
                ("    return x[:, :, None], y", ANY),
                ("    return x, y.astype('int8')", OK),
                ("    return x, y.astype('uint64')", ANY),
                ("    return x, (y * 10**9).astype('int64')", ANY),
                ("    return x, y.astype(bool)", ANY),
                ("    return x.astype('datetime64[s]'), y", WRONG),
                ("    return {'train': (x, y)}", WRONG),
                ("    return {'train': (x, y), 'eval': (x, y)}", ANY),
                ("    return (x, y), (x, y)", WRONG),
                ("    raise ValueError('no luck')", WRONG),
                ("    return 1 / 0", WRONG),
                ("    raise KeyboardInterrupt", frozenset({130})),
                ("    raise SystemExit(0)", ANY - OK),
                ("    raise SystemExit('bye')", ANY - OK),
                ("    raise MemoryError('too much')", ANY - OK),
                ("    raise StopIteration", WRONG),
                ("    import nowhere_at_all", WRONG | UNSUPPORTED),
                ("    open('nowhere.npy')", WRONG),
                ("    assert False", WRONG),
                ("    return x, y[:, None]", ANY),
                ("    return 'x', 'y'", WRONG),
                ("    return 3, 4", WRONG),
                ("    return (x, x), y", WRONG),
                ("    return {'a': x}, y", WRONG),
                ("    return x[..., :0], y", WRONG),
                ("    return np.float32(x), {'a': y}", WRONG),
                ("    return data", WRONG),
                ("    return x.tolist(), y.tolist()", ANY),
                ("    return x, np.where(np.arange(len(y)) == 7, 99, y)", ANY if False else OK),
                ("    return x, np.where(np.arange(len(y)) == 7, 10**6, y)", ANY),
                ("    return np.random.rand(40, 6), np.random.randint(0, 3, 40)", ANY),
                ("    raise Exception('\\x1b[31mred\\x1b[0m\\nand more')", WRONG),
                ("    raise ValueError('long ' * 2000)", WRONG),
                ("    raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()", WRONG),
                ("    return x.shape", WRONG),
                ("    return np.ma.masked_array(x), y", ANY),
                ("    return x, y.reshape(2, -1)", WRONG),
                ("    return (x, y) if split == 'train' else None", WRONG),
                ("    return (x, y) if split == 'train' else (x[:0], y[:0])", WRONG),
                ("    return (x, y) if split == 'train' else (x[:, :4], y)", WRONG),
                ("    return (x, y) if split == 'train' else (x, y + 5)", WRONG),
                ("    return (x, y) if split == 'train' else (x.astype('float64'), y)", ANY),
                ("    return (x, y) if split == 'train' else (x, y, y)", ANY),
                ("    return (x, y) if split == 'train' else (x * np.nan, y)", ANY),
                ("    return x.astype('float64') * 1e300, y", ANY),
                ("    return x.astype('float16') * 60000, y", ANY),
            )
        )
        + tuple(
            ("def data(split):", new, codes)
            for new, codes in (
                ("def data():\n    split = 'train'", WRONG),
                ("def data(split, folder):", WRONG),
                ("def data(*, Split):\n    split = Split", WRONG),
                ("def data(*split):", WRONG),
                ("async def data(split):", WRONG),
                ("data = 3\ndef other(split):", WRONG),
                ("class data:\n  def other(split):\n    pass\ndef other(split):", WRONG),
                ("data = property\ndef other(split):", WRONG),
                ("def data(split, /):", WRONG),
                ("import functools\n@functools.lru_cache\ndef data(split):", OK),
                ("def data(split='eval'):", OK),
                ("def data(**split):", ANY),
                ("@staticmethod\ndef data(split):", OK),
            )
        )
    ),
    "object": (
        tuple(
            (_OBJECT_END, new, codes)
            for new, codes in (
                ("        return self.x[index]", WRONG),
                ("        return None", WRONG),
                ("        raise IndexError(index)", WRONG),
                ("        raise ValueError('bad luck') if index == 9 else 0", WRONG),
                ("        return (self.x[index], self.y[index]) if index != 9 else None", WRONG),
                ("        return (self.x[index], self.y[index]) if index != 9 else 1 / 0", WRONG),
                ("        return self.x[index][:5 + index % 2], self.y[index]", WRONG),
                ("        return self.x[index], self.y[index] + 0.5 * (index == 9)", ANY),
                ("        return self.x[index], str(self.y[index])", WRONG),
                ("        return self.x[index], self.y[index] - 1", WRONG),
                ("        return self.x[index], self.y[index] + 3 * (index == 9)", WRONG),
                ("        return [self.x[index], self.y[index]]", WRONG),
                ("        return self.x[index] * (np.nan if index == 9 else 1), self.y[index]", DIVERGED),
                ("        return {'x': self.x[index]}, self.y[index]", WRONG),
                ("        return self.x[index], self.y[index], 1", OK),
                ("        return (self.x[index], self.y[index], 1)[:2 + index % 2]", WRONG),
                ("        return self.x[index + 1], self.y[index]", WRONG),
                ("        return self.x[index], None", WRONG),
                ("        return self.x[index], object()", WRONG),
                ("        raise SystemExit(0) if index == 9 else KeyError(index)", ANY - OK),
                ("        raise StopIteration", WRONG),
                ("        return self.x[index].astype('float64' if index % 2 else 'float32'), self.y[index]", ANY),
                ("        return tuple(self.x[index]), self.y[index]", ANY),
                ("        import os; os._exit(3) if index == 11 else 0", ANY | frozenset({3})),
                ("        return self.x[index], self.y[index], 'heavy'", WRONG),
                ("        return self.x[index], 10**12", ANY),
                ("        return self.x[index], 2**70", WRONG),
                ("        return (self.x[index], self.y[index]) * 2", WRONG),
                ("        raise Exception", WRONG),
            )
        )
        + tuple(
            ("        return len(self.x)", new, codes)
            for new, codes in (
                ("        return 0", DATA),
                ("        return -1", WRONG),
                ("        return 10**9", WRONG),
                ("        return None", WRONG),
                ("        return 'many'", WRONG),
                ("        return 2.5", WRONG),
                ("        raise RuntimeError('no length')", WRONG),
                ("        return 1", ANY),
                ("        return 2**63", WRONG),
            )
        )
        + (
            ("    def __len__(self):\n        return len(self.x)\n", "", WRONG),
            ("    def __getitem__", "    def getitem", WRONG),
            ("(self, split)", "(self)", WRONG),
            ("(self, index)", "(self)", WRONG),
        )
    ),
    "stream": tuple(
        (_STREAM_END, new, codes)
        for new, codes in (
            (_STREAM_END + ".batch(4)", WRONG),
            (_STREAM_END + ".shuffle(40)", WRONG),
            (_STREAM_END + ".take(0)", WRONG),
            (_STREAM_END + ".repeat()", ANY),
            (_STREAM_END + ".batch(4, drop_remainder=True)", WRONG),
            (_STREAM_END + ".map(lambda x, y: x)", WRONG),
            (_STREAM_END + ".map(lambda x, y: {'x': x, 'y': y})", WRONG),
            (_STREAM_END + ".take(3)", ANY),
            (_STREAM_END + ".map(lambda x, y: (x, y - 1))", WRONG),
            (_STREAM_END + ".map(lambda x, y: (x / 0., y))", DIVERGED),
            (_STREAM_END + ".filter(lambda x, y: False)", WRONG),
            (_STREAM_END + ".map(lambda x, y: (tf.strings.as_string(x), y))", WRONG),
            (_STREAM_END + ".map(lambda x, y: (x, y, x))", WRONG),
            (_STREAM_END + ".map(lambda x, y: (x, y, y))", ANY),
            (_STREAM_END + ".map(lambda x, y: (tf.ensure_shape(x, [7]), y))", WRONG),
            ("iter(" + _STREAM_END + ")", WRONG),
            (_STREAM_END + ".as_numpy_iterator()", WRONG),
            ("list(" + _STREAM_END + ")", ANY),
            (
                _STREAM_END + ".map(lambda x, y: (x, tf.debugging.check_numerics(tf.cast(y, tf.float32) / 0., 'no')))",
                WRONG,
            ),
            (
                (
                    "tf.data.Dataset.from_generator(lambda: zip(*data(split)), output_signature=(tf.TensorSpec([6]),"
                    " tf.TensorSpec([], tf.int32)))"
                ),
                OK,
            ),
            (
                (
                    "tf.data.Dataset.from_generator(lambda: zip(*data(split)), output_signature=(tf.TensorSpec([None]),"
                    " tf.TensorSpec([], tf.int32)))"
                ),
                WRONG,
            ),
            (
                (
                    "tf.data.Dataset.from_generator(lambda: zip(*data(split)), output_signature=(tf.TensorSpec([7]),"
                    " tf.TensorSpec([], tf.int32)))"
                ),
                WRONG,
            ),
            (
                (
                    "tf.data.Dataset.from_generator(lambda: (1 / 0 for _ in range(3)),"
                    " output_signature=(tf.TensorSpec([6]), tf.TensorSpec([], tf.int32)))"
                ),
                WRONG,
            ),
            (
                (
                    "tf.data.Dataset.from_generator(lambda: [], output_signature=(tf.TensorSpec([6]), tf.TensorSpec([],"
                    " tf.int32)))"
                ),
                WRONG,
            ),
            ("tf.data.Dataset.range(10)", WRONG),
            ("tf.constant(data(split)[0])", WRONG),
            ("data(split)[0].tolist()", WRONG),
            (
                (
                    "tf.data.Dataset.from_generator(lambda: ((x, y) if i < 9 else 1 / 0 for i, (x, y) in"
                    " enumerate(zip(*data(split)))), output_signature=(tf.TensorSpec([6]), tf.TensorSpec([],"
                    " tf.int32)))"
                ),
                WRONG,
            ),
            (
                (
                    "tf.data.Dataset.from_generator(lambda: zip(*data(split)), output_signature=(tf.TensorSpec([6],"
                    " tf.int32), tf.TensorSpec([], tf.int32)))"
                ),
                ANY,
            ),
            (_STREAM_END + ".map(lambda x, y: (x, tf.cast(y, tf.int64) + 100))", WRONG),
            ("tf.data.TextLineDataset('nowhere.txt').map(lambda line: (tf.zeros([6]), 0))", WRONG),
            ("tf.data.TFRecordDataset('mine.py').map(lambda line: (tf.zeros([6]), 0))", WRONG),
        )
    ),
    "model": (
        tuple(
            (_LAST_LAYER, new, codes)
            for new, codes in (
                ("keras.layers.Dense(2)])", WRONG),
                ("keras.layers.Dense(1)])", WRONG),
                ("keras.layers.Dense(5)])", OK),
                ("keras.layers.Dense(0)])", WRONG),
                ("keras.layers.Dense('three')])", WRONG),
                ("keras.layers.Dense(3, activation='softmax')])", OK),
                ("keras.layers.Dense(3, activation='reluu')])", WRONG),
                ("keras.layers.Dense(3, dtype='float16')])", ANY),
                ("3])", WRONG),
                ("])", ANY),
                ("keras.layers.Conv2D(3, 3)])", WRONG),
                ("keras.layers.Flatten(), keras.layers.Reshape((5, 5))])", WRONG),
                ("keras.layers.Dense(3, kernel_initializer='zeroes')])", WRONG),
                ("keras.layers.Lambda(lambda x: x[:, :2])])", WRONG),
                ("keras.layers.Lambda(lambda x: 1 / 0)])", WRONG),
                ("keras.layers.Lambda(lambda x: x * float('nan')), keras.layers.Dense(3)])", DIVERGED),
                ("keras.layers.Lambda(lambda x: keras.ops.cast(x[:, :3], 'int32'))])", WRONG),
                ("keras.layers.Lambda(lambda x: keras.ops.argmax(x, -1))])", WRONG),
                ("keras.layers.Embedding(3, 3)])", ANY),
                ("keras.layers.Dense(3, trainable=False)])", OK),
                ("keras.layers.Dropout(1.5), keras.layers.Dense(3)])", WRONG),
                ("keras.layers.BatchNormalization(axis=5), keras.layers.Dense(3)])", WRONG),
                ("keras.layers.Dense(10**7), keras.layers.Dense(10**7)])", ANY - OK),
                ("keras.layers.LSTM(3)])", WRONG),
                ("keras.layers.RepeatVector(3)])", WRONG),
                ("keras.layers.Dense(3, bias_constraint=3)])", ANY - OK),
                ("keras.layers.Lambda(lambda x: print(x.numpy()))])", WRONG),
                ("keras.layers.Dense(3, kernel_regularizer='l3')])", WRONG),
            )
        )
        + tuple(
            ("    return keras.Sequential", new, codes)
            for new, codes in (
                ("    return None\n    return keras.Sequential", WRONG),
                ("    return 3\n    keras.Sequential", WRONG),
                ("    keras.Sequential", WRONG),
                ("    return keras.Sequential([keras.layers.Dense(3)])\n    keras.Sequential", WRONG),
                ("    return keras.layers.Dense(3)\n    keras.Sequential", WRONG),
                ("    raise RuntimeError('no model')\n    keras.Sequential", WRONG),
                ("    return keras.models.load_model('nowhere.keras')\n    keras.Sequential", WRONG),
                ("    return keras.models.load_model('mine.py')\n    keras.Sequential", WRONG),
                ("    return keras.Model\n    keras.Sequential", WRONG),
                ("    return keras.Model()\n    keras.Sequential", WRONG),
                ("    return keras.applications.ResNet51()\n    keras.Sequential", WRONG),
                ("    return keras, 1\n    keras.Sequential", WRONG),
                (
                    (
                        "    class Own(keras.Model):\n        def call(self, x):\n            return x\n    return"
                        " Own()\n    keras.Sequential"
                    ),
                    WRONG,
                ),
                ("    class Own(keras.Model):\n        pass\n    return Own()\n    keras.Sequential", WRONG),
                (
                    (
                        "    class Own(keras.Model):\n        def __init__(self):\n            self.layer ="
                        " keras.layers.Dense(3)\n    return Own()\n    keras.Sequential"
                    ),
                    WRONG,
                ),
                (
                    (
                        "    class Own(keras.Model):\n        def __init__(self):\n            super().__init__()\n    "
                        "        self.layer = keras.layers.Dense(3)\n        def call(self, x):\n            return"
                        " self.layer(x)[:, :2]\n    found = Own()\n    found.build((None, 6))\n    return found\n   "
                        " keras.Sequential"
                    ),
                    WRONG,
                ),
                (
                    (
                        "    class Own(keras.Model):\n        def __init__(self):\n            super().__init__()\n    "
                        "        self.layer = keras.layers.Dense(3)\n        def call(self, x, training):\n           "
                        " return 1 / 0\n    found = Own()\n    found.build((None, 6))\n    return found\n   "
                        " keras.Sequential"
                    ),
                    WRONG,
                ),
                (
                    (
                        "    class Own(keras.Model):\n        def __init__(self):\n            super().__init__()\n    "
                        "        self.layer = keras.layers.Dense(3)\n        def call(self, x):\n            return"
                        " self.layer(x) if keras.ops.sum(x) > 0 else x\n    found = Own()\n    found.layer.build((None,"
                        " 6))\n    found.built = True\n    return found\n    keras.Sequential"
                    ),
                    ANY,
                ),
                (
                    (
                        "    a = keras.Input((6,)); b = keras.Input((6,))\n    return keras.Model([a, b],"
                        " keras.layers.Dense(3)(a + b))\n    keras.Sequential"
                    ),
                    WRONG,
                ),
                (
                    (
                        "    a = keras.Input((9,))\n    return keras.Model(a, keras.layers.Dense(3)(a))\n   "
                        " keras.Sequential"
                    ),
                    WRONG,
                ),
                (
                    (
                        "    a = keras.Input((6,))\n    return keras.Model(a, [keras.layers.Dense(3)(a),"
                        " keras.layers.Dense(3)(a)])\n    keras.Sequential"
                    ),
                    WRONG,
                ),
                (
                    (
                        "    a = keras.Input((6,), batch_size=5)\n    return keras.Model(a, keras.layers.Dense(3)(a))\n"
                        "    keras.Sequential"
                    ),
                    ANY,
                ),
                (
                    (
                        "    a = keras.Input((6,), dtype='int32')\n    return keras.Model(a,"
                        " keras.layers.Dense(3)(keras.ops.cast(a, 'float32')))\n    keras.Sequential"
                    ),
                    ANY,
                ),
                (
                    (
                        "    a = keras.Input((6,))\n    return keras.Model(a, {'out': keras.layers.Dense(3)(a)})\n   "
                        " keras.Sequential"
                    ),
                    ANY,
                ),
                ("    import tensorflow as tf\n    return tf.Module()\n    keras.Sequential", WRONG),
                ("    import torch_of_nobody\n    keras.Sequential", WRONG),
                ("    a = keras.Input((6,))\n    return keras.Model(a, a)\n    keras.Sequential", ANY - OK),
                (
                    (
                        "    a = keras.Input((6,))\n    b = keras.layers.Dense(3)(a)\n    return keras.Model(a,"
                        " keras.ops.mean(b))\n    keras.Sequential"
                    ),
                    WRONG,
                ),
                ("    import sys\n    sys.exit(0)\n    keras.Sequential", ANY - OK),
            )
        )
        + tuple(
            ("def model(input_shape, num_outputs):", new, codes)
            for new, codes in (
                ("def model():\n    input_shape, num_outputs = (6,), 3", OK),
                ("def model(input_shape, num_outputs, depth):", WRONG),
                ("def model(shape, num_outputs):\n    input_shape = shape", WRONG),
                ("def model(*input_shape):\n    num_outputs = 3", ANY),
                ("model = 7\ndef other(input_shape, num_outputs):", WRONG),
                ("def models(input_shape, num_outputs):", WRONG),
                ("def model(self, input_shape, num_outputs):", WRONG),
                ("def model(input_shape, num_outputs, *, size='big'):", OK),
                ("class model:\n    pass\ndef other(input_shape, num_outputs):", WRONG),
            )
        )
    ),
    "objective": (
        tuple(
            ("    return Scores(losses, w, ", new, codes)
            for new, codes in (
                ("    return losses\n    Scores(losses, w, ", WRONG),
                ("    return tf.reduce_mean(losses)\n    Scores(losses, w, ", WRONG),
                ("    return None\n    Scores(losses, w, ", WRONG),
                ("    return Scores(tf.reduce_mean(losses), w, ", WRONG),
                ("    return Scores(losses[:, None], w, ", WRONG),
                ("    return Scores(losses, w[:, None], ", WRONG),
                ("    return Scores(losses, 1.0, ", WRONG),
                ("    return Scores(losses, None, ", WRONG),
                ("    return Scores(losses, w, None)\n    Scores(losses, w, ", WRONG),
                ("    return Scores(losses, w, [])\n    Scores(losses, w, ", WRONG),
                ("    return Scores(losses, w)\n    Scores(losses, w, ", WRONG),
                ("    return (losses, w, {})\n    Scores(losses, w, ", OK),
                ("    raise ValueError('no objective')\n    Scores(losses, w, ", WRONG),
                ("    return Scores(losses, w, {'m': 3})\n    Scores(losses, w, ", WRONG),
                ("    return Scores(losses, w, {'m': 'text'})\n    Scores(losses, w, ", WRONG),
                ("    return Scores(losses, w, {'m': tf.reduce_mean(losses)})\n    Scores(losses, w, ", WRONG),
                ("    return Scores(losses, w, {3: losses})\n    Scores(losses, w, ", WRONG),
                ("    return Scores(losses, w, {'loss': losses})\n    Scores(losses, w, ", ANY),
                ("    return Scores(losses * float('nan'), w, ", DIVERGED),
                ("    return Scores(losses / 0.0, w, ", DIVERGED),
                ("    return Scores(tf.cast(losses, tf.int32), w, ", WRONG),
                ("    return Scores(losses > 0, w, ", WRONG),
                ("    return Scores(tf.strings.as_string(losses), w, ", WRONG),
                ("    return Scores(losses.numpy(), w, ", WRONG),
                ("    return Scores(losses, w, {'m': tf.strings.as_string(losses)})\n    Scores(losses, w, ", WRONG),
                ("    return Scores(outputs, w, ", WRONG),
                ("    return Scores(tf.stop_gradient(losses), w, ", WRONG),
                ("    return Scores(tf.zeros([3]), w, ", WRONG),
                ("    return Scores(tf.zeros_like(losses), w, ", ANY),
                ("    return Scores(losses, tf.zeros_like(w), ", ANY),
                ("    return Scores(losses, -w, ", ANY),
                ("    return Scores(tf.cast(losses, tf.float64), w, ", ANY),
                ("    return Scores(losses[:-1], w, ", WRONG),
                ("    return Scores(losses, w, {'a/b': losses, '': losses})\n    Scores(losses, w, ", ANY),
                ("    return Scores(losses, w, {'m\\x1b[31m': losses})\n    Scores(losses, w, ", ANY),
                ("    return Scores(losses, w, {'samples': losses})\n    Scores(losses, w, ", ANY),
                ("    return Scores(losses, w, {'m': tf.cast(losses > 1, tf.bool)})\n    Scores(losses, w, ", ANY),
                ("    return Scores(losses * 1e38 * 1e3, w, ", DIVERGED),
            )
        )
        + tuple(
            ("def objective(outputs, y, w):", new, codes)
            for new, codes in (
                ("def objective(y_true, y_pred):\n    outputs, y, w = y_pred, y_true, 1", WRONG),
                ("def objective(outputs, y):\n    w = 1", WRONG),
                ("def objective(outputs, y, w, more):", WRONG),
                ("def objective():\n    outputs = y = w = 0", WRONG),
                ("objective = 'mse'\ndef other(outputs, y, w):", WRONG),
                ("def objective(*arguments):\n    outputs, y, w = arguments", OK),
                ("async def objective(outputs, y, w):", WRONG),
                ("class objective:\n    pass\ndef other(outputs, y, w):", WRONG),
                ("def objective(outputs, y, w):\n    yield outputs", WRONG),
                ("def objective(y, outputs, w):", WRONG),
                ("def objective(outputs, y, w):\n    y = y[:, 0]", WRONG),
                ("def objective(outputs, y, w):\n    outputs = outputs['logits']", WRONG),
                ("def objective(outputs, y, w):\n    y = tf.one_hot(y, 3)", WRONG),
            )
        )
    ),
    "augment": (
        tuple(
            ("    return x * 1.5, y", new, codes)
            for new, codes in (
                ("    return x", WRONG),
                ("    return None", WRONG),
                ("    return x, y, y", WRONG),
                ("    return [x, y]", WRONG),
                ("    return x[:2], y[:2]", WRONG),
                ("    return x[:-1], y", WRONG),
                ("    return x, y + 5", WRONG),
                ("    return x, y - 9", WRONG),
                ("    return x.numpy(), y", WRONG),
                ("    return np.array(x), y", WRONG),
                ("    raise ValueError('no')", WRONG),
                ("    return x[:, :3], y", ANY),
                ("    return x / 0.0, y", DIVERGED),
                ("    return x[0], y[0]", WRONG),
                ("    import tensorflow as tf\n    return tf.cast(x, tf.int32), y", ANY),
                ("    import tensorflow as tf\n    return tf.strings.as_string(x), y", WRONG),
                ("    import tensorflow as tf\n    return tf.concat([x, x], 0), tf.concat([y, y], 0)", WRONG),
                ("    return x, 3", WRONG),
                ("    return 'x', y", WRONG),
                ("    return x * np.random.rand(), y", OK),
                ("    if x[0, 0] > 0:\n        return x, y\n    return -x, y", WRONG),
                ("    return (x for x in x), y", WRONG),
                ("    return x, y[:, None]", ANY),
                ("    import tensorflow as tf\n    return tf.reshape(x, [-1]), y", WRONG),
                ("    import tensorflow as tf\n    return x, tf.cast(y, tf.float32)", ANY),
                ("    import tensorflow as tf\n    return tf.py_function(lambda: 1 / 0, [], tf.float32), y", WRONG),
                (
                    (
                        "    import tensorflow as tf\n    return tf.ensure_shape(tf.numpy_function(lambda a: a[:, :5],"
                        " [x], tf.float32), x.shape), y"
                    ),
                    WRONG,
                ),
                (
                    (
                        "    import tensorflow as tf\n    return tf.ensure_shape(tf.numpy_function(lambda a: 1 / 0,"
                        " [x], tf.float32), x.shape), y"
                    ),
                    WRONG,
                ),
            )
        )
        + tuple(
            ("def augment(x, y, seeds):", new, codes)
            for new, codes in (
                ("def augment(x, y):", WRONG),
                ("def augment(image):\n    x = y = image", WRONG),
                ("def augment(x, y, seeds, more):", WRONG),
                ("augment = []\ndef other(x, y, seeds):", WRONG),
                ("async def augment(x, y, seeds):", WRONG),
                ("def augment(x, y, seeds):\n    yield x", WRONG),
            )
        )
    ),
}
# What is wrong with the file as a whole: (text before it, text after it or instead of it)
WHOLE: tuple[tuple[str, str], ...] = (
    ("", "def data(split)\n    return 1\n"),
    ("raise RuntimeError('on import')\n", ""),
    ("import nowhere_at_all\n", ""),
    ("\x00", ""),
    ("import sys; sys.exit(0)\n", ""),
    ("import sys; sys.exit('bye')\n", ""),
    ("1 / 0\n", ""),
    ("   x = 3\n", ""),
    ("", "\n    unexpected\n"),
    ("from mine import nothing\n", ""),
    ("raise KeyboardInterrupt\n", ""),
    ("'", ""),
    ("\udcff\udcfe", ""),
    ("import os; os.chdir('/nowhere')\n", ""),
    ("from . import other\n", ""),
    ("assert False, '\\x1b[31mred'\n", ""),
    ("import tensorflow.nowhere\n", ""),
    ("open('nowhere.txt')\n", ""),
    ("def f(): f()\nf()\n", ""),
    ("raise Exception\n", ""),
    ("raise BaseException('odd')\n", ""),
    ("del __name__\nraise NameError\n", ""),
)


def function(chance: random.Random) -> Mistake:
    part = chance.choice(list(CHANGES))
    old, new, codes = chance.choice(CHANGES[part])
    used = PARTS[part]
    assert used.text.count(old) == 1, (part, old)
    module = MINE.replace(used.text, used.text.replace(old, new))
    arguments = [*TRAIN, *used.flags, *_setting(part, chance)]
    surely = 0 not in codes and 130 not in codes
    return one(
        f"own {part}",
        arguments,
        codes,
        *(
            (*used.names, "mine.py", "a sample's", "label", "weights", "--objective", "--model=")
            if surely and codes <= WRONG
            else ()
        ),
        files={"mine.py": module},
    )


def _setting(part: str, chance: random.Random) -> list[str]:
    """Draws flags that reach the same code in other ways."""
    return chance.choice(
        [
            [],
            [],
            [],
            ["--accumulation=2"],
            ["--steps=6", "--steps_per_loop=2"],
            ["--eval_every=1"],
            ["--deterministic"],
            ["--precision=bfloat16"],
            ["--noshuffle"],
            ["--strategy=mirrored", "--virtual_devices=2"],
            ["--epochs=1", "--steps=0"] if part != "stream" else [],  # its number of samples is unknown
            ["--ema=0.9"],
        ]
    )


def file(chance: random.Random) -> Mistake:
    before, after = chance.choice(WHOLE)
    part = chance.choice(list(PARTS))
    other = HEAD + "\n".join([DATA_SOURCE, OBJECT, STREAM]) if part in ("model", "objective", "augment") else MINE
    flags = [flag.replace("mine:", "broken:") for flag in PARTS[part].flags] or ["--source=broken:data"]
    codes = frozenset({130}) if "KeyboardInterrupt" in before else CONFIG
    return one(
        "own file",
        [*TRAIN, *flags],
        codes,
        "broken" if codes == CONFIG else "",
        files={"mine.py": other, "broken.py": before + (MINE if not after or before else "") + after},
    )
