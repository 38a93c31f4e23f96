"""JAX for bench_gpu.py: gpu_jax.py MODEL BATCH STEPS WINDOWS RESULT.json

Weights are float32, computation is in bfloat16; the whole step runs under jit with donated buffers. Legend: B batch, T
tokens, D width, V vocabulary, H heads.
"""

import json
import sys
import time
from functools import partial

import jax
import numpy as np
import optax
from jax import numpy as jnp

LAYERS, D, H, T, V = 12, 768, 12, 1024, 50257
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # (width, number of blocks); each block ends in 4 x width


def normal(key, *shape):
    return 0.02 * jax.random.normal(key, shape, jnp.float32)


def gpt2_weights(key) -> dict:
    keys = iter(jax.random.split(key, 2 + 4 * LAYERS))
    blocks = [
        {
            "g1": jnp.ones(D),
            "b1": jnp.zeros(D),
            "g2": jnp.ones(D),
            "b2": jnp.zeros(D),
            "qkv": normal(next(keys), D, 3 * D),
            "qkv_b": jnp.zeros(3 * D),
            "out": normal(next(keys), D, D),
            "out_b": jnp.zeros(D),
            "up": normal(next(keys), D, 4 * D),
            "up_b": jnp.zeros(4 * D),
            "down": normal(next(keys), 4 * D, D),
            "down_b": jnp.zeros(D),
        }
        for _ in range(LAYERS)
    ]
    return {
        "tokens": normal(next(keys), V, D),
        "positions": normal(next(keys), T, D),
        "g": jnp.ones(D),
        "b": jnp.zeros(D),
        "blocks": blocks,
    }


def layer_norm(x, gain, bias):
    x = x.astype(jnp.float32)
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return (x * gain + bias).astype(jnp.bfloat16)


def gpt2(weights, tokens_BT):
    w = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
    x = w["tokens"][tokens_BT] + w["positions"]
    for block in w["blocks"]:
        qkv = layer_norm(x, block["g1"], block["b1"]) @ block["qkv"] + block["qkv_b"]
        q, k, v = (part.reshape(*part.shape[:2], H, D // H) for part in jnp.split(qkv, 3, -1))
        y = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn" if jax.default_backend() == "gpu" else None
        )
        x = x + y.reshape(x.shape) @ block["out"] + block["out_b"]
        y = jax.nn.gelu(layer_norm(x, block["g2"], block["b2"]) @ block["up"] + block["up_b"], approximate=True)
        x = x + y @ block["down"] + block["down_b"]
    return layer_norm(x, w["g"], w["b"]) @ w["tokens"].T


def resnet_weights(key) -> dict:
    keys = iter(jax.random.split(key, 64))

    def conv(size, inputs, outputs):
        return {"k": normal(next(keys), size, size, inputs, outputs), "g": jnp.ones(outputs), "b": jnp.zeros(outputs)}

    blocks, inputs = [], 64
    for width, count in STAGES:
        for index in range(count):
            block = {"a": conv(1, inputs, width), "b": conv(3, width, width), "c": conv(1, width, 4 * width)}
            blocks.append(block | ({} if index else {"skip": conv(1, inputs, 4 * width)}))
            inputs = 4 * width
    return {"stem": conv(7, 3, 64), "blocks": blocks, "out": normal(next(keys), inputs, 1000), "out_b": jnp.zeros(1000)}


def resnet(weights, x):
    def conv(x, w, stride=1):
        size = w["k"].shape[0]
        x = jax.lax.conv_general_dilated(
            x,
            w["k"].astype(jnp.bfloat16),
            (stride, stride),
            [(size // 2, size // 2)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        ).astype(jnp.float32)
        x = (x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5)
        return (x * w["g"] + w["b"]).astype(jnp.bfloat16)

    x = jax.nn.relu(conv(x.astype(jnp.bfloat16), weights["stem"], 2))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), [(0, 0), (1, 1), (1, 1), (0, 0)])
    for index, w in enumerate(weights["blocks"]):
        stride = 2 if "skip" in w and index else 1
        y = conv(jax.nn.relu(conv(jax.nn.relu(conv(x, w["a"])), w["b"], stride)), w["c"])
        x = jax.nn.relu(y + (conv(x, w["skip"], stride) if "skip" in w else x))
    return x.mean((1, 2)).astype(jnp.float32) @ weights["out"] + weights["out_b"]


def main(name: str, batch: int, steps: int, windows: int, path: str) -> None:
    random = np.random.default_rng(0)
    if name == "gpt2":
        model, weights, optimizer = gpt2, gpt2_weights(jax.random.key(0)), optax.adamw(1e-4, weight_decay=0.1)
        x, y = jnp.asarray(random.integers(0, V, (2, batch, T), dtype=np.int32))
    else:
        model, weights, optimizer = resnet, resnet_weights(jax.random.key(0)), optax.sgd(1e-3, momentum=0.9)
        x, y = (
            jnp.asarray(random.standard_normal((batch, 224, 224, 3), np.float32)),
            jnp.asarray(random.integers(0, 1000, batch, dtype=np.int32)),
        )

    def loss(weights, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model(weights, x).astype(jnp.float32), y).mean()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights, state, x, y):
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value

    parameters, state, ends = sum(leaf.size for leaf in jax.tree.leaves(weights)), optimizer.init(weights), []
    for _ in range(windows):
        total = 0.0
        for _ in range(steps):
            weights, state, value = step(weights, state, x, y)
            total += value
        float(total)
        ends.append(time.time())
    with open(path, "w") as file:
        json.dump({"ends": ends, "parameters": parameters}, file)


main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
