"""The workloads as Keras models, for Keras 3 and for tf-keras: `keras` is an argument everywhere.

Uses layers that both have, and a few custom layers made of TensorFlow operations. Kernels start from workloads.initial.
Legend: workloads.py; H heads, K = D / H.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf
from workloads import BLOCKS, CLASSES, STAGES, Workload, initial

EPSILON = 1e-5


def build(workload: Workload, keras: Any):
    """Returns the float32 model: token ids, images or categories -> logits."""
    return {"cnn": _cnn, "resnet": _resnet, "embedding": _embedding, "transformer": _transformer}[workload.kind](
        keras, **workload.sizes
    )


def make_optimizer(workload: Workload, keras: Any):
    """Returns the optimizer of the workload, with Keras' own defaults."""
    kind = {"adam": keras.optimizers.Adam, "sgd": keras.optimizers.SGD}[workload.optimizer]
    return kind(learning_rate=workload.learning_rate)


def start(name: str):
    """Returns a kernel initializer for either Keras."""
    return lambda shape, dtype=None, **_: tf.constant(initial(name, tuple(shape)))


def dense(keras, name: str, width: int, **options):
    return keras.layers.Dense(width, kernel_initializer=start(name), name=name.replace("/", "_"), **options)


def _cnn(keras, side: int, channels: int):
    layers = keras.layers
    inputs = x = keras.Input((side, side, channels))
    for index, width in enumerate((32, 64)):
        x = layers.Conv2D(width, 3, padding="same", activation="relu", kernel_initializer=start(f"conv_{index}"))(x)
        x = layers.MaxPooling2D(2)(x)
    x = dense(keras, "hidden", 128, activation="relu")(layers.Flatten()(x))
    return keras.Model(inputs, dense(keras, "logits", CLASSES)(x))


def _resnet(keras, side: int, channels: int):
    layers = keras.layers

    def conv(x, name: str, width: int, size: int = 3, stride: int = 1):
        # Explicit padding: with a stride of 2, "same" pads at the end only, PyTorch on both sides.
        if size == 3 and stride == 2:
            x = layers.ZeroPadding2D(1)(x)
        padding = "valid" if stride == 2 else "same"
        x = layers.Conv2D(width, size, stride, padding=padding, use_bias=False, kernel_initializer=start(name))(x)
        return layers.BatchNormalization(momentum=0.9, epsilon=EPSILON)(x)

    inputs = keras.Input((side, side, channels))
    x = layers.ReLU()(conv(inputs, "stem", STAGES[0]))
    for stage, width in enumerate(STAGES):
        for index in range(BLOCKS):
            name, stride, changes = f"stage_{stage}_{index}", 2 if stage and not index else 1, x.shape[-1] != width
            y = layers.ReLU()(conv(x, f"{name}/a", width, stride=stride))
            y = conv(y, f"{name}/b", width)
            x = layers.ReLU()(layers.Add()([y, conv(x, f"{name}/skip", width, 1, stride) if changes else x]))
    return keras.Model(inputs, dense(keras, "logits", CLASSES)(layers.GlobalAveragePooling2D()(x)))


def _embedding(keras, rows: int, width: int, features: int):
    layers = keras.layers
    inputs = keras.Input((features,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(rows, width, embeddings_initializer=start("embed"))(inputs))
    for index, hidden in enumerate((256, 64)):
        x = dense(keras, f"hidden_{index}", hidden, activation="relu")(x)
    return keras.Model(inputs, dense(keras, "logits", CLASSES)(x))


def _transformer(keras, layers: int, width: int, heads: int, length: int, vocabulary: int):
    mask_TT = tf.linalg.band_part(tf.ones([length, length]), -1, 0) * 1e9 - 1e9  # 0 where a query may attend to a key
    mask_TT = mask_TT.numpy()

    class Positions(keras.layers.Layer):
        """Adds a learned vector to each position. [B, T, D] -> [B, T, D]."""

        def build(self, _):
            self.table = self.add_weight(name="table", shape=(length, width), initializer=start("embed_positions"))

        def call(self, x):
            return x + tf.convert_to_tensor(self.table)

        def compute_output_shape(self, shape):
            return shape

    class Attention(keras.layers.Layer):
        """Causal softmax attention without weights. [B, T, 3 D] -> [B, T, D]."""

        def call(self, qkv):
            def by_head(x):
                return tf.transpose(tf.reshape(x, [-1, length, heads, width // heads]), [0, 2, 1, 3])

            q_BHTK, k_BHTK, v_BHTK = (by_head(part) for part in tf.split(qkv, 3, axis=-1))
            scores_BHTT = tf.matmul(q_BHTK * (width // heads) ** -0.5, k_BHTK, transpose_b=True) + mask_TT
            y_BTHK = tf.transpose(tf.matmul(tf.nn.softmax(scores_BHTT), v_BHTK), [0, 2, 1, 3])
            return tf.reshape(y_BTHK, [-1, length, width])

        def compute_output_shape(self, shape):
            return (*shape[:-1], width)

    def norm(name: str):
        return keras.layers.LayerNormalization(epsilon=EPSILON, name=name)

    tokens_BT = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, width, embeddings_initializer=start("embed_tokens"))(tokens_BT)
    x = Positions()(x)
    for index in range(layers):
        name = f"block_{index}"
        y = Attention()(dense(keras, f"{name}/qkv", 3 * width)(norm(f"{name}_norm_1")(x)))
        x = keras.layers.Add()([x, dense(keras, f"{name}/out", width)(y)])
        y = dense(keras, f"{name}/up", 4 * width, activation=lambda h: keras.activations.gelu(h, approximate=True))(
            norm(f"{name}_norm_2")(x)
        )
        x = keras.layers.Add()([x, dense(keras, f"{name}/down", width)(y)])
    return keras.Model(tokens_BT, dense(keras, "logits", vocabulary, use_bias=False)(norm("final_norm")(x)))


def mean_loss(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns the softmax cross-entropy in nats, averaged over samples and tokens."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def count(model) -> int:
    """Returns the number of trainable parameters."""
    return sum(math.prod(variable.shape) for variable in model.trainable_variables)


def forward_flops(model, batch: int) -> int:
    """Counts the FLOPs of matrix products and convolutions in the graph of a forward pass of `batch` samples."""
    shape, dtype = model.inputs[0].shape, model.inputs[0].dtype
    spec = tf.TensorSpec([batch, *shape[1:]], dtype)
    graph = tf.function(lambda x: model(x, training=False)).get_concrete_function(spec).graph
    total = 0
    for op in graph.get_operations():
        if op.type == "MatMul":
            total += 2 * math.prod(op.outputs[0].shape) * op.inputs[0].shape[0 if op.get_attr("transpose_a") else 1]
        elif op.type in ("BatchMatMulV2", "BatchMatMul"):
            total += 2 * math.prod(op.outputs[0].shape) * op.inputs[0].shape[-2 if op.get_attr("adj_x") else -1]
        elif op.type == "Conv2D":
            total += 2 * math.prod(op.outputs[0].shape) * math.prod(op.inputs[1].shape[:3])
        elif op.type in ("Einsum", "PartitionedCall", "StatefulPartitionedCall", "XlaLaunch", "DepthwiseConv2dNative"):
            raise RuntimeError(f"the FLOP count does not support {op.type} ({op.name})")
    return total
