"""Mistakes in Keras scripts that call tfdist.fit and related functions on two workers.

What is wrong in plain Keras, too (the same script in one process), may end as it does there: with Keras' own words and
code 1. What plain Keras can do must work, or be refused in a sentence.
"""

from __future__ import annotations

import json
import random

from tests.mistakes.clusters import VALID
from tests.mistakes.mistake import ANY, Mistake, Process
from tests.mistakes.modules import SCRIPT

_FIT = "tfdist.fit(model, x, y, batch_size=8, epochs=2, verbose=0)"
_EVALUATE = "tfdist.evaluate(model, x, y, batch_size=8, verbose=0)"
_PREDICT = "tfdist.predict(model, x, batch_size=8, verbose=0)"
_MODEL = (
    'model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)])'
)
_COMPILE = (
    'model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),'
    ' metrics=["accuracy"])'
)
_LABELS = "y = random.integers(0, 3, 24)"

# (old text, new text); a script on several workers knows its rank as `rank`
CHANGES: tuple[tuple[str, str], ...] = (
    *(
        (_FIT, new)
        for new in (
            "tfdist.fit(x, y)",
            "tfdist.fit()",
            "tfdist.fit(model)",
            "tfdist.fit(model, x)",
            "tfdist.fit(None, x, y)",
            "tfdist.fit(keras.layers.Dense(3), x, y)",
            "tfdist.fit('model', x, y)",
            "tfdist.fit(model, x, y, batch_size=0)",
            "tfdist.fit(model, x, y, batch_size=-3)",
            "tfdist.fit(model, x, y, batch_size='8')",
            "tfdist.fit(model, x, y, batch_size=2.5)",
            "tfdist.fit(model, x, y, epochs=0)",
            "tfdist.fit(model, x, y, epochs=-1)",
            "tfdist.fit(model, x, y, epochs='2')",
            "tfdist.fit(model, x, y[:5])",
            "tfdist.fit(model, x[:0], y[:0])",
            "tfdist.fit(model, x[:1], y[:1], verbose=0)",
            "tfdist.fit(model, x, y, batch_size=1, verbose=0)",
            "tfdist.fit(model, x, y, validation_split=1.5)",
            "tfdist.fit(model, x, y, validation_split=-0.2)",
            "tfdist.fit(model, x, y, validation_split=0.999)",
            "tfdist.fit(model, x, y, validation_data=x)",
            "tfdist.fit(model, x, y, validation_data=(x[:0], y[:0]))",
            "tfdist.fit(model, x, y, validation_data=(x, y[:3]))",
            "tfdist.fit(model, x, y, class_weight={0: 1})",
            "tfdist.fit(model, x, y, class_weight=[1, 2, 3])",
            "tfdist.fit(model, x, y, class_weight={'a': 1})",
            "tfdist.fit(model, x, y, sample_weight=np.ones(7))",
            "tfdist.fit(model, x, y, sample_weight='heavy')",
            "tfdist.fit(model, x, y, sample_weight=np.ones(24), class_weight={0: 1, 1: 1, 2: 1})",
            "tfdist.fit(model, x, y, steps_per_epoch=0)",
            "tfdist.fit(model, x, y, steps_per_epoch=100, verbose=0)",
            "tfdist.fit(model, x, y, steps_per_epoch=-1)",
            "tfdist.fit(model, x, y, initial_epoch=5)",
            "tfdist.fit(model, x, y, callbacks=3)",
            "tfdist.fit(model, x, y, callbacks=['early'])",
            "tfdist.fit(model, x, y, callbacks=[keras.callbacks.EarlyStopping])",
            "tfdist.fit(model, x, y, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=lambda e, l: 1 / 0)])",
            "tfdist.fit(model, x, y, callbacks=[keras.callbacks.ModelCheckpoint('nowhere/x')])",
            "tfdist.fit(model, x, y, callbacks=[keras.callbacks.BackupAndRestore('')])",
            "tfdist.fit(model, x, y, callbacks=[keras.callbacks.LearningRateScheduler(lambda e: 'fast')])",
            "tfdist.fit(model, x, y, callbacks=[keras.callbacks.CSVLogger('/nowhere/log.csv')])",
            "tfdist.fit(model, x, y, callbacks=[keras.callbacks.EarlyStopping(monitor='nothing')], verbose=0)",
            "tfdist.fit(model, x, y, callbacks=[keras.callbacks.ReduceLROnPlateau(factor=2.0)])",
            "tfdist.fit(model, x, y, verbose='loud')",
            "tfdist.fit(model, x, y, shuffle='yes', verbose=0)",
            "tfdist.fit(model, x, y, workers=3)",
            "tfdist.fit(model, x, y, learning_rate=3)",
            "tfdist.fit(model, x.tolist(), y.tolist())",
            "tfdist.fit(model, {'a': x}, y)",
            "tfdist.fit(model, [x, x], y)",
            "tfdist.fit(model, x[:, :4], y)",
            "tfdist.fit(model, x.astype(str), y)",
            "tfdist.fit(model, x, y.astype(str))",
            "tfdist.fit(model, x * np.nan, y, verbose=0)",
            "tfdist.fit(model, x, y + 5, verbose=0)",
            "tfdist.fit(model, x, y - 1, verbose=0)",
            "tfdist.fit(model, x, np.eye(3)[y])",
            "tfdist.fit(model, x, y.astype('float32'), verbose=0)",
            "tfdist.fit(model, iter([]))",
            "tfdist.fit(model, (1 / 0 for _ in range(3)))",
            "tfdist.fit(model, ((x[:8], y[:8]) for _ in range(2)), epochs=2, verbose=0)",
            "tfdist.fit(model, ((x[:8], y[:8]) for _ in range(2)), epochs=1, steps_per_epoch=5, verbose=0)",
            "tfdist.fit(model, ((x[:8],) for _ in range(2)))",
            "tfdist.fit(model, (x[:8] for _ in range(2)))",
            "tfdist.fit(model, ((x[:8], y[:7]) for _ in range(2)))",
            "tfdist.fit(model, ((x[:8 - i], y[:8 - i]) for i in range(3)), verbose=0)",
            "tfdist.fit(model, ((x[:8], y[:8]) if i < 2 else None for i in range(3)))",
            "import tensorflow as tf\ntfdist.fit(model, tf.data.Dataset.from_tensor_slices((x, y)))",
            "import tensorflow as tf\ntfdist.fit(model, tf.data.Dataset.from_tensor_slices((x, y)).batch(8), y)",
            (
                "import tensorflow as tf\ntfdist.fit(model, tf.data.Dataset.from_tensor_slices((x, y)).batch(8),"
                " batch_size=8)"
            ),
            "import tensorflow as tf\ntfdist.fit(model, tf.data.Dataset.from_tensor_slices((x, y)).batch(8).take(0))",
            (
                "import tensorflow as tf\ntfdist.fit(model, tf.data.Dataset.from_tensor_slices((x,"
                " y)).batch(8).repeat(), verbose=0, epochs=1, steps_per_epoch=2)"
            ),
            (
                "import tensorflow as tf\ntfdist.fit(model, tf.data.Dataset.from_tensor_slices((x,"
                " y)).batch(8).map(lambda a, b: (tf.debugging.check_numerics(a / 0., 'mine'), b)), verbose=0)"
            ),
            (
                "import tensorflow as tf\ntfdist.fit(model, tf.data.Dataset.from_generator(lambda: (1 / 0 for _ in"
                " 'ab'), output_signature=(tf.TensorSpec([8, 6]), tf.TensorSpec([8], tf.int32))), verbose=0)"
            ),
            (
                "class Own(keras.utils.PyDataset):\n    def __len__(self):\n        return 3\n    def __getitem__(self,"
                " i):\n        return (x[:8], y[:8]) if i < 2 else 1 / 0\ntfdist.fit(model, Own(), verbose=0)"
            ),
            (
                "class Own(keras.utils.PyDataset):\n    def __getitem__(self, i):\n        return x[:8],"
                " y[:8]\ntfdist.fit(model, Own(), verbose=0)"
            ),
            (
                "class Own(keras.utils.PyDataset):\n    def __len__(self):\n        return 0\n    def __getitem__(self,"
                " i):\n        return x[:8], y[:8]\ntfdist.fit(model, Own(), verbose=0)"
            ),
            (
                "class Own(keras.utils.PyDataset):\n    def __len__(self):\n        return 3\n    def __getitem__(self,"
                " i):\n        return x[:8]\ntfdist.fit(model, Own(), verbose=0)"
            ),
            "raise RuntimeError('of the script itself')",
            "import sys; sys.exit(3)",
            "import sys; sys.exit('bye')",
            "import sys; sys.exit(0)",
            "raise KeyboardInterrupt",
            "model.fit(x, y, verbose=0)",
            "with tfdist.spread(model): raise ValueError('inside')",
            "with tfdist.spread(x): pass",
            "with tfdist.spread(keras.Sequential([keras.layers.Dense(3)])): pass",
            "tfdist.spread(model)",
            "tfdist.fit(model, x, y, verbose=0); tfdist.init(pack_mb=3)",
            "tfdist.init(nothing=3)",
            "tfdist.init(local_gpus=2)",
            "tfdist.init(startup_timeout='long')",
            "tfdist.init(startup_timeout=-1)",
            "tfdist.init(heartbeat_timeout=0)",
            "tfdist.init(pack_mb=float('nan'))",
            "tfdist.init(job_token_file='nowhere')",
            "tfdist.init(3)",
            "tfdist.init(collective_timeout=None)",
            "tfdist.init(pack_mb=True)",
            "tfdist.barrier(3)",
            "tfdist.fits(model, x, y)",
            "tfdist.fit(model, x, y, validation_freq=0, validation_data=(x, y))",
            "tfdist.fit(model, x, y, validation_steps=3)",
            "tfdist.fit(model, x, y, validation_batch_size=0, validation_data=(x, y))",
        )
    ),
    *(
        (_EVALUATE, new)
        for new in (
            "tfdist.evaluate(model)",
            "tfdist.evaluate(model, x)",
            "tfdist.evaluate(model, x, y[:3])",
            "tfdist.evaluate(model, x[:0], y[:0])",
            "tfdist.evaluate(model, x, y, steps=0)",
            "tfdist.evaluate(model, x, y, steps=99, verbose=0)",
            "tfdist.evaluate(model, x, y, batch_size=0)",
            "tfdist.evaluate(None, x, y)",
            "tfdist.evaluate(model, x, y, return_dict=3, verbose=0)",
            "tfdist.evaluate(model, x[:1], y[:1], verbose=0)",
            "tfdist.evaluate(model, ((x[:8], y[:8]) for _ in range(2)), steps=3, verbose=0)",
            "tfdist.evaluate(model, x, y, callbacks=[keras.callbacks.LambdaCallback(on_test_end=lambda logs: 1 / 0)])",
            "tfdist.evaluate(model, x[:, :3], y)",
            "tfdist.evaluate(model, x, y, sample_weight=[1])",
        )
    ),
    *(
        (_PREDICT, new)
        for new in (
            "tfdist.predict(model)",
            "tfdist.predict(model, x[:0])",
            "tfdist.predict(model, x[:, :2])",
            "tfdist.predict(model, x, batch_size=0)",
            "tfdist.predict(model, x, steps=0)",
            "tfdist.predict(model, 'x')",
            "tfdist.predict(None, x)",
            "tfdist.predict(model, x[:1], verbose=0)",
            "tfdist.predict(model, x, batch_size=1, verbose=0)",
            "tfdist.predict(model, None)",
            "tfdist.predict(model, x, y)",
            "tfdist.predict(keras.Sequential([keras.layers.Dense(2)]), x, verbose=0)",
        )
    ),
    *(
        (_MODEL, new)
        for new in (
            "model = keras.Sequential([keras.layers.Dense(3)])",
            "model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])",
            "model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])",
            "model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), keras.layers.Softmax()])",
            "model = keras.Sequential([])",
            "model = keras.Sequential([keras.Input((6,)), keras.layers.Lambda(lambda x: 1 / 0)])",
            (
                "model = keras.Sequential([keras.Input((6,)), keras.layers.Lambda(lambda x: keras.ops.mean(x, 0,"
                " keepdims=True)), keras.layers.Dense(3)])"
            ),
            (
                "model = keras.Sequential([keras.Input((6,)), keras.layers.Reshape((6, 1)), keras.layers.LSTM(3,"
                " stateful=True)])"
            ),
            "model = keras.Sequential([keras.Input((6,), batch_size=8), keras.layers.Dense(3)])",
            (
                "model = keras.Sequential([keras.Input((6,)), keras.layers.Lambda(lambda x: x[:4]),"
                " keras.layers.Dense(3)])"
            ),
            "class Own(keras.Model):\n    pass\nmodel = Own()",
            "class Own(keras.Model):\n    def call(self, x):\n        return 3\nmodel = Own()",
            "class Own(keras.Model):\n    def call(self, x):\n        raise ValueError('in call')\nmodel = Own()",
            (
                "class Own(keras.Model):\n    def __init__(self):\n        super().__init__()\n        self.d ="
                " keras.layers.Dense(3)\n    def call(self, x):\n        return self.d(x)\n    def train_step(self,"
                " data):\n        return {'loss': 1 / 0}\nmodel = Own()"
            ),
            (
                "class Own(keras.Model):\n    def __init__(self):\n        super().__init__()\n        self.d ="
                " keras.layers.Dense(3)\n    def call(self, x):\n        return self.d(x)\n    def train_step(self,"
                " data):\n        return None\nmodel = Own()"
            ),
            (
                "class Own(keras.Model):\n    def __init__(self):\n        super().__init__()\n        self.d ="
                " keras.layers.Dense(3)\n    def call(self, x):\n        return self.d(x)\n    def train_step(self,"
                " data):\n        return {'loss': self(data[0])}\nmodel = Own()"
            ),
            (
                "import tensorflow as tf\nwith tf.distribute.MirroredStrategy().scope():\n    model ="
                " keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])"
            ),
            "model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, trainable=False)])",
            "model = keras.Sequential([keras.Input((6,)), keras.layers.Flatten()])",
            (
                "model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), keras.layers.Lambda(lambda x: x *"
                " float('nan'))])"
            ),
            "a = keras.Input((6,)); b = keras.Input((6,))\nmodel = keras.Model([a, b], keras.layers.Dense(3)(a + b))",
            "a = keras.Input((6,))\nmodel = keras.Model(a, [keras.layers.Dense(3)(a), keras.layers.Dense(3)(a)])",
            "model = keras.applications.MobileNet(weights='nowhere.h5')",
            "model = keras.models.load_model('nowhere.keras')",
        )
    ),
    *(
        (_COMPILE, new)
        for new in (
            "pass",
            "model.compile()",
            'model.compile(optimizer="sgdd", loss="mse")',
            'model.compile(optimizer="sgd", loss="msee")',
            'model.compile(optimizer="sgd")',
            'model.compile(optimizer="sgd", loss="mse", metrics=["nothing"])',
            'model.compile(optimizer=3, loss="mse")',
            'model.compile(optimizer="sgd", loss=lambda a, b: 1 / 0)',
            'model.compile(optimizer="sgd", loss=lambda a: a)',
            'model.compile(optimizer="sgd", loss=lambda a, b: None)',
            'model.compile(optimizer="sgd", loss="categorical_crossentropy")',
            'model.compile(optimizer=keras.optimizers.SGD(float("nan")), loss="sparse_categorical_crossentropy")',
            'model.compile(optimizer=keras.optimizers.SGD(-1.0), loss="sparse_categorical_crossentropy")',
            'model.compile(optimizer="sgd", loss="mse", loss_weights=[1, 2])',
            'model.compile(optimizer="sgd", loss=["mse", "mse"])',
            'model.compile(optimizer="sgd", loss={"out": "mse"})',
            'model.compile(optimizer="sgd", loss="mse", run_eagerly=True)',
            (
                'model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),'
                " jit_compile=True)"
            ),
            (
                'model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),'
                " steps_per_execution=0)"
            ),
            (
                'model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),'
                " steps_per_execution=50)"
            ),
            'model.compile(optimizer=[keras.optimizers.SGD()], loss="mse")',
            'model.compile(optimizer=keras.optimizers.SGD(gradient_accumulation_steps=1), loss="mse")',
            'model.compile(optimizer="sgd", loss="mse", metrics=[lambda a, b: 1 / 0])',
            'model.compile(optimizer="sgd", loss="mse", metrics=["accuracy", 3])',
        )
    ),
    *(
        (_LABELS, new)
        for new in (
            "y = random.integers(-1, 3, 24)",
            "y = random.integers(0, 9, 24)",
            "y = random.normal(size=24)",
            "y = ['a'] * 24",
            "y = None",
            "y = np.full(24, np.nan)",
            "y = random.integers(0, 3, (24, 2))",
            "y = random.integers(0, 3, 0)",
        )
    ),
    # what differs between workers
    *(
        (_FIT, new)
        for new in (
            "tfdist.fit(model, x, y, batch_size=8 + rank, verbose=0)",
            "tfdist.fit(model, x, y, epochs=1 + rank, verbose=0)",
            "tfdist.fit(model, x[rank:], y[rank:], verbose=0)",
            "tfdist.fit(model, x + rank, y, verbose=0)",
            "if rank == 0:\n    tfdist.fit(model, x, y, verbose=0)",
            "if rank == 1:\n    raise ValueError('of one worker')\n" + _FIT,
            "if rank == 1:\n    import os; os._exit(7)\n" + _FIT,
            "if rank == 1:\n    import sys; sys.exit(0)\n" + _FIT,
            "if rank == 0:\n    tfdist.evaluate(model, x, y, verbose=0)\n" + _FIT,
            "tfdist.fit(model, ((x[:8], y[:8]) for _ in range(2 + rank)), verbose=0)",
            "tfdist.fit(model, ((x[:8 - rank], y[:8 - rank]) for _ in range(2)), verbose=0)",
            (
                "tfdist.fit(model, x, y, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=lambda e, l:"
                " 1 / 0 if rank else None)])"
            ),
            (
                "tfdist.fit(model, x, y, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=lambda"
                " b, l: setattr(model, 'stop_training', rank == 1))])"
            ),
            "tfdist.fit(model, x[:, :6 - rank], y, verbose=0)",
            "tfdist.fit(model, x, y, class_weight={0: 1, 1: 1, 2: 1 + rank}, verbose=0)",
            "tfdist.fit(model, x, y, validation_data=(x, y) if rank else None, verbose=0)",
            "tfdist.fit(model, x, y if rank else y.astype('float32'), verbose=0)",
            "tfdist.fit(keras.models.clone_model(model) if rank else model, x, y, verbose=0)",
            "if rank:\n    model.add(keras.layers.Dense(3))\n    model.compile('sgd', 'mse')\n" + _FIT,
            "if rank:\n    tfdist.barrier()\n" + _FIT,
            "model.save('mine.keras') if rank == 0 else None\nif rank:\n    keras.models.load_model('not_yet.keras')\n"
            + _FIT,
            "if rank:\n    model.trainable = False\n    model.compile('sgd', 'mse')\n" + _FIT,
            "tfdist.evaluate(model, x, y, steps=1 + rank, verbose=0)\n",
        )
    ),
    *(
        (_COMPILE, new)
        for new in (
            _COMPILE + "\nmodel.compile('adam' if rank else 'sgd', 'mse')",
            _COMPILE + "\nmodel.compile('sgd', 'mse' if rank else 'mae')",
            _COMPILE + "\nmodel.compile('sgd', 'mse', metrics=['mae'] if rank else [])",
            _COMPILE + "\nmodel.compile(keras.optimizers.SGD(0.1 + rank), 'mse')",
            _COMPILE + "\nmodel.compile('sgd', 'mse', run_eagerly=bool(rank))",
            _COMPILE + "\nmodel.compile('sgd', 'mse', steps_per_execution=1 + rank)",
        )
    ),
    *(
        (_MODEL, new)
        for new in (
            "model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8 + rank), keras.layers.Dense(3)])",
            (
                "model = keras.Sequential([keras.Input((6,)), *[keras.layers.Dense(8) for _ in range(1 + rank)],"
                " keras.layers.Dense(3)])"
            ),
            (
                "model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation='tanh' if rank else"
                " 'relu'), keras.layers.Dense(3)])"
            ),
            "keras.config.set_floatx('float64' if rank else 'float32')\n" + _MODEL,
            (
                "model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, dtype='float64' if rank else"
                " 'float32'), keras.layers.Dense(3)])"
            ),
            "model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5 * rank), keras.layers.Dense(3)])",
        )
    ),
)
_HEAD = (
    'import json, os\nrank = json.loads(os.environ.get("TF_CONFIG") or "{\\"task\\": {\\"index\\":'
    ' 0}}")["task"]["index"]\nimport keras\nimport tfdist\nif "TF_CONFIG" in os.environ:\n   '
    " tfdist.init(startup_timeout=20, heartbeat_timeout=5)\n"
)
_OWN_INIT = "tfdist.init("


def script(chance: random.Random) -> Mistake:
    old, new = chance.choice(CHANGES)
    assert SCRIPT.count(old) == 1, old
    head = _HEAD if _OWN_INIT not in new or "pack_mb=3" in new else _HEAD.partition("if ")[0]
    processes = tuple(
        Process(
            ("script", "script.py"), {"TF_CONFIG": json.dumps({**VALID, "task": {"type": "worker", "index": rank}})}
        )
        for rank in range(2)
    )
    kind = "script: another on one worker" if "rank" in new else "script"
    return Mistake(kind, processes, ANY, files={"script.py": head + SCRIPT.replace(old, new)}, plain=True)
