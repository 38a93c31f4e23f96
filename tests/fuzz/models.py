"""Builds a model from a drawn description, as Python source that a user would write: the fuzzer runs what it prints.

Shapes: rows [n, 6], grid [n, 5, 5, 3], steps [n, 4, 6] made of ids [n, 4].
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

WIDTH, LENGTH, SIDE, CHANNELS, VOCABULARY = 6, 4, 5, 3, 11
# Blocks that add losses which are means or sums over rows.
SUMS_AND_MEANS = ("mean_loss", "sum_in_evaluation", "sum_loss", "rows_loss", "activity_loss", "kept_loss")
# Blocks that add losses which are neither means nor sums over rows.
NO_SUMS = ("max_loss", "floored_loss", "first_loss", "hidden_loss")
# Blocks whose output for a row depends on other rows: the first by a user's code, the second by Keras' layers alone.
MIXING = {"centered", "unit_columns"}
# Blocks that change state of their own in training.
STATES = {"batch_norm", "counter", "long_counter", "running_mean", "keeps", "grown", "spectral"}

# name -> (shapes it works on, lines; {name} is the layer's name, {width} the size of the last dim).
# "instead of NAME": sometimes drawn in place of that block (space.INSTEAD).
BLOCKS: dict[str, tuple[str, str]] = {
    "dense": ("rows steps", 'x = layers.Dense({width}, activation="tanh", name="{name}")(x)'),
    "dense_l2": (
        "rows steps",
        (
            'x = layers.Dense({width}, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.05),'
            ' name="{name}")(x)'
        ),
    ),
    "grown": (  # instead of dense_l2
        "rows steps",
        'x = layers.Dense({width}, activation="tanh", kernel_constraint=own.Grows(), name="{name}")(x)',
    ),
    "activity_loss": (
        "rows steps",
        (
            'x = layers.Dense({width}, activation="tanh", activity_regularizer=keras.regularizers.L2(0.1),'
            ' name="{name}")(x)'
        ),
    ),
    "mean_loss": ("rows grid steps", 'x = own.MeanLoss(0.3, name="{name}")(x)'),
    "sum_in_evaluation": ("rows grid steps", 'x = own.SumInEvaluation(0.3, name="{name}")(x)'),  # instead of mean_loss
    "sum_loss": ("rows grid steps", 'x = own.SumLoss(0.02, name="{name}")(x)'),
    "rows_loss": ("rows grid steps", 'x = own.RowsLoss(0.02, name="{name}")(x)'),  # instead of sum_loss
    "kept_loss": ("rows grid steps", 'x = own.KeptLoss(0.3, name="{name}")(x)'),  # instead of activity_loss
    "max_loss": ("rows grid steps", 'x = own.MaxLoss(0.1, name="{name}")(x)'),
    "first_loss": ("rows grid steps", 'x = own.FirstLoss(0.1, name="{name}")(x)'),  # instead of max_loss
    "hidden_loss": ("rows grid steps", 'x = own.HiddenLoss(0.3, name="{name}")(x)'),  # instead of floored_loss
    "floored_loss": ("rows grid steps", 'x = own.FlooredLoss(0.1, name="{name}")(x)'),
    "inner_metric": ("rows grid steps", 'x = own.InnerMetric(name="{name}")(x)'),
    "batch_norm": ("rows grid steps", 'x = layers.BatchNormalization({axis}, momentum=0.8, name="{name}")(x)'),
    "frozen_batch_norm": ("rows grid", 'x = layers.BatchNormalization(trainable=False, name="{name}")(x)'),
    "layer_norm": (
        "rows steps",
        'x = layers.Activation("gelu", name="{name}_gelu")(layers.LayerNormalization(name="{name}")(x))',
    ),
    "frozen": ("rows steps", 'x = layers.Dense({width}, activation="tanh", trainable=False, name="{name}")(x)'),
    "idle": ("rows steps", 'x = own.Idle({width}, name="{name}")(x)'),  # instead of frozen
    "in_function": ("rows steps", 'x = own.InFunction({width}, name="{name}")(x)'),  # instead of shared
    "holds_function": ("rows steps", 'x = own.HoldsFunction({width}, name="{name}")(x)'),  # instead of in_function
    "shared": (
        "rows steps",
        (
            '{name} = layers.Dense({width}, activation="tanh", name="{name}")\nx ='
            ' layers.Add(name="{name}_add")([{name}(x), {name}({name}(x))])'
        ),
    ),
    "counter": ("rows steps grid", 'x = own.Counter(name="{name}")(x)'),
    "long_counter": ("rows steps grid", 'x = own.LongCounter(name="{name}")(x)'),  # instead of counter
    "centered": ("rows grid steps", 'x = own.centered(x, {width}, "{name}")'),
    "unit_columns": (  # instead of centered
        "rows grid steps",
        'x = layers.UnitNormalization(axis=-len(x.shape), name="{name}")(x)',
    ),
    "louder": ("rows grid steps", 'x = own.Around(own.Louder(name="{name}_inner"), name="{name}")(x)'),
    "draws": ("rows grid steps", 'x = own.Draws(name="{name}")(x)'),  # instead of louder
    "resting": (  # instead of draws
        "rows grid steps",
        'x = own.Resting(own.Louder(name="{name}_inner"), name="{name}")(x)',
    ),
    "scaled": (  # instead of resting
        "rows grid steps",
        'x = own.Scaled(own.Louder(name="{name}_inner"), name="{name}")(x)',
    ),
    "running_mean": ("rows", 'x = own.RunningMean(name="{name}")(x)'),
    "keeps": ("rows", 'x = own.Keeps(name="{name}")(x)'),  # instead of running_mean
    "dropout": ("rows grid steps", 'x = layers.Dropout(0.3, name="{name}")(x)'),
    "positions": ("steps", 'x = own.{positions}({length}, {width}, name="{name}")(x)'),
    "spectral": (
        "rows",
        'x = layers.SpectralNormalization(layers.Dense({width}, name="{name}_inner"), name="{name}")(x)',
    ),
    "float64": ("rows", 'x = layers.Dense({width}, activation="tanh", dtype="float64", name="{name}")(x)'),
    "bfloat16": ("rows", 'x = layers.Dense({width}, activation="tanh", dtype="{low_bfloat16}", name="{name}")(x)'),
    "float16": ("rows", 'x = layers.Dense({width}, activation="tanh", dtype="{low_float16}", name="{name}")(x)'),
    "residual": ("rows steps", 'x = layers.Add(name="{name}_add")([x, layers.Dense({width}, name="{name}")(x)])'),
    "twins": ("rows steps", 'x = own.twins(x, {width}, "{name}")'),  # instead of residual
    "column": (  # instead of twins: [.., D] + [.., 1], then [.., D, D] + [.., D, 1]
        "rows steps",
        'x = layers.Add(name="{name}_add")([x, layers.Dense(1, name="{name}")(x)])\n{name} = x[..., None] *'
        " keras.ops.tanh(x)[..., None, :] + x[..., None]\nx = keras.ops.mean({name}, axis=-1)",
    ),
    "conv": (
        "grid",
        'x = layers.Conv2D({width}, 3, padding="same", use_bias=False, activation="tanh", name="{name}")(x)',
    ),
    "conv_steps": ("steps", 'x = layers.Conv1D({width}, 3, padding="causal", activation="tanh", name="{name}")(x)'),
    "depthwise": ("grid", 'x = layers.DepthwiseConv2D(2, padding="same", name="{name}")(x)'),
    "lstm": ("steps", 'x = layers.LSTM({width}, return_sequences=True, name="{name}")(x)'),
    "attention": (
        "steps",
        'x = layers.Add(name="{name}_add")([x, layers.MultiHeadAttention(2, 8, name="{name}")(x, x)])',
    ),
    "attention_causal": (  # instead of attention
        "steps",
        (
            'x = layers.Add(name="{name}_add")([x, layers.MultiHeadAttention(2, 8, name="{name}")(x, x,'
            " use_causal_mask=True)])"
        ),
    ),
    # A block that --recompute=block and pipe= can cut at; {inside} are lines of other blocks.
    "block": (
        "rows steps",
        (
            '{name}_in = x\nx = layers.LayerNormalization(name="{name}_norm_1")(x)\n{inside}\nx = layers.Dense({width},'
            ' name="{name}_mlp_out")(x)\nx = layers.Add(name="{name}_mlp_add")([{name}_in, x])'
        ),
    ),
}
EMBEDDINGS = {
    "embedding": 'x = layers.Embedding({vocabulary}, {width}, name="table")(x)',
    "embedding_masked": 'x = layers.Embedding({vocabulary}, {width}, mask_zero=True, name="table")(x)',
    # Sometimes instead of embedding_masked: a mask that depends on the whole row, and one that depends on other rows.
    "embedding_row_mask": 'x = own.RowMask({vocabulary}, {width}, name="table")(x)',
    "embedding_batch_mask": 'x = own.BatchMask({vocabulary}, {width}, name="table")(x)',
    "embedding_twice": 'x = own.Twice({vocabulary}, {width}, name="table")(x)',
    "embedding_large": 'x = layers.Embedding(300, {width}, name="table")(x)',  # only few of its rows are looked up
    "embedding_looked": 'x = own.Looked({vocabulary}, {width}, name="table")(x)',
    "embedding_some": 'x = own.Some({vocabulary}, {width}, name="table")(x)',  # row count known at run time only
    "embedding_shared": (
        'table = layers.Embedding({vocabulary}, {width}, name="table")\nx = layers.Subtract()([table(x),'
        " layers.Lambda(lambda v: 0.3 * v)(table(layers.Lambda(lambda i: (i + 2) % {vocabulary})(x)))])"
    ),
}
MASKS = ("embedding_masked", "embedding_row_mask", "embedding_batch_mask")
_TWO = [
    ('inputs = {{"a": keras.Input(({width},), name="a"), "ids": keras.Input(({length},), dtype="int32", name="ids")}}'),
    'x = inputs["ids"]',
    "{embedding}",
    'x = layers.GlobalAveragePooling1D(name="pooled")(x)',
]
INPUTS = {
    "rows": ['x = inputs = keras.Input(({width},), name="a")'],
    "grid": [
        'x = inputs = keras.Input(({side}, {side}, 2), name="a")',
        'x = layers.Conv2D({channels}, 3, padding="same", use_bias=False, activation="tanh", name="first")(x)',
    ],
    "steps": ['x = inputs = keras.Input(({length},), dtype="int32", name="ids")', "{embedding}"],
    "both": [
        *_TWO,
        'x = layers.Concatenate(name="joined")([inputs["a"], x])',
        'x = layers.Dense({width}, activation="tanh", name="first")(x)',
    ],
    # Uses the mean of one input over all rows of the batch, of which a worker needs all: only tfdist.fit detects that.
    "averaged": [*_TWO, 'x = own.AndMean(name="joined")([x, inputs["a"]])'],
}
TO_ROWS = {
    "rows": [],
    "both": [],
    "averaged": [],
    "grid": ['x = layers.Flatten(name="flat")(x)', 'x = layers.Dense({width}, activation="tanh", name="narrow")(x)'],
    "steps": ['x = layers.GlobalAveragePooling1D(name="pooled")(x)'],
}
_INPUT = {"rows": "a", "grid": "a", "steps": "ids"}  # the name of a single input
ONLY = "only"  # the name of a single output
TWO = ("both", "averaged")  # kinds of two named inputs
HEADS = {
    "classes": ['outputs = layers.Dense(3, dtype="{head}", name="kind")(x)'],
    "probabilities": [  # in place of "classes"; some are too small for a crossentropy that does not see their logits
        'outputs = layers.Dense(3, activation="softmax", bias_initializer=own.FarApart(), dtype="{head}",'
        ' name="kind")(x)'
    ],
    "values": ['outputs = layers.Dense(2, dtype="{head}", name="size")(x)'],
    "tokens": ['outputs = layers.Dense(4, dtype="{head}", name="kind")(x)'],
    "dict": [
        'outputs = {{"kind": layers.Dense(3, dtype="{head}", name="kind")(x), "size": layers.Dense(1, dtype="{head}",'
        ' name="size")(x)}}'
    ],
}


def shape_of(inputs: str) -> str:
    """Returns the shape that the blocks of a model with such inputs work on."""
    return "rows" if inputs in TWO else inputs


MIXES_CHANNELS = "mixes_channels"  # between layers that model= cuts
# What is built around tfdist's transformer, which makes it a user's own model.
AROUND = {
    "": "return inner",
    "scaled": "return keras.Model(inner.input, layers.Rescaling(0.5, dtype='{head}')(inner.output))",
    "nested": "inputs = keras.Input(inner.input.shape[1:], dtype='int32')\nreturn keras.Model(inputs, inner(inputs))",
    "own_head": (
        "body = inner.get_layer('final_norm').output\n"
        "return keras.Model(inner.input, layers.Dense(12, name='own_head', dtype='{head}')(body))"
    ),
    **{
        name: (
            "def called(layer, *given, **options):\n"
            "    y = layer(*given, **options)\n"
            f"    return own.Between({mixes}, name='between')(y) if layer.name.endswith('_00_mlp_up') else y\n"
            "return keras.models.clone_model(inner, clone_function=lambda layer: layer, call_function=called)"
        )
        for name, mixes in (("between", False), (MIXES_CHANNELS, True))
    },
    "frozen": (
        "for layer in inner.layers:\n"
        "    layer.trainable = not layer.name.endswith(('embed_tokens', '_00_attention_out', '_01_experts_up'))\n"
        "return inner"
    ),
}


def source(model: Mapping[str, Any], double: bool = False) -> str:
    """Returns the function `model()` as Python source. double: entirely in float64, for the reference."""
    if "builtin" in model:
        around = AROUND[model.get("around", "")].format(head="float64" if double else "float32")
        return (
            f'def model():\n    inner = transformer(x_spec=tf.TensorSpec(({LENGTH},), "int32"),'
            f" **dict({model['builtin']}))\n{textwrap.indent(around, '    ')}\n"
        )
    shape = shape_of(model["inputs"])
    words = {
        "width": CHANNELS if shape == "grid" else WIDTH,
        "axis": 1 if model.get("places_normed") else -1,  # along which a mask runs
        "length": LENGTH,
        "positions": "RowTokens" if model.get("by_sizes") else "Positions",
        "side": SIDE,
        "channels": CHANNELS,
        "vocabulary": VOCABULARY,
        "head": "float64" if double else "float32",
        "low_bfloat16": "float64" if double else "bfloat16",
        "low_float16": "float64" if double else "float16",
    }
    lines = [
        line.format(**words, embedding=EMBEDDINGS.get(model.get("embedding", ""), "").format(**words))
        for line in INPUTS[model["inputs"]]
    ]
    if model.get("shared"):  # between the first and the last segment
        lines += ['shared = own.Counter(name="shared")', "x = shared(x)"]
    lines += _blocks(model["blocks"], words, "")
    lines += ["x = shared(x)"] if model.get("shared") else []
    words["width"] = WIDTH
    head = HEADS["probabilities" if model.get("probabilities") else model["head"]]
    lines += [line.format(**words) for line in ([] if model["head"] == "tokens" else TO_ROWS[model["inputs"]]) + head]
    kind = model.get("class")  # of train_steps.py
    made = f"train_steps.{kind}" if kind else "own.Withheld" if model.get("withheld") else "keras.Model"
    named = model.get("named", ())
    takes = f'{{"{_INPUT[model["inputs"]]}": inputs}}' if "input" in named else "inputs"
    gives = f'{{"{ONLY}": outputs}}' if "output" in named else "outputs"
    lines.append(f"made = {made}({takes}, {gives})")
    if model.get("frozen_first"):  # nothing to train before the second block, perhaps in a whole stage
        lines += ["for layer in made.layers:", '    layer.trainable = not layer.name.startswith(("block_00", "table"))']
    lines.append("return made")
    return "def model():\n" + textwrap.indent("\n".join(lines), "    ") + "\n"


def _blocks(blocks: Sequence, words: Mapping[str, Any], prefix: str) -> list[str]:
    lines, cut = [], 0
    for index, block in enumerate(blocks):
        if isinstance(block, str):
            lines.append(BLOCKS[block][1].format(**words, name=f"{prefix}{block}_{index}"))
        else:  # a list: a block that a model is cut at
            name = f"block_{cut:02d}"
            lines.append(
                BLOCKS["block"][1].format(**words, name=name, inside="\n".join(_blocks(block, words, f"{name}_")))
            )
            cut += 1
    return [line for text in lines for line in text.split("\n") if line]


def build(model: Mapping[str, Any], double: bool = False):
    """The Keras model."""
    import keras
    import tensorflow as tf
    from keras import layers

    from tests.fuzz import layers as own
    from tests.fuzz import train_steps
    from tfdist.models.transformer import transformer

    names: dict[str, Any] = {
        "keras": keras,
        "layers": layers,
        "own": own,
        "train_steps": train_steps,
        "tf": tf,
        "transformer": transformer,
    }
    exec(source(model, double), names)  # noqa: S102 - our own text
    made = names["model"]()
    from tests.fuzz import given

    if "unlike" in model:
        layer = next(each for each in made._flatten_layers() if hasattr(each, "activation"))
        if len(model["blocks"]) % 2:  # computes the same, but a user's layer might not
            layer.settings = SimpleNamespace(rates={"of this worker": [float(given.rank)]})
        elif given.rank:
            layer.activation = keras.activations.softsign
    return made
