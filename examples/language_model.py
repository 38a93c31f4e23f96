"""Trains a small byte-level language model on Python's standard library with `tfdist.fit`, then generates text.

    source scripts/environment.sh && python -m tfdist.launch --workers=2 -- examples/language_model.py

Expected, in two minutes on two cores: a loss that falls from 5.5 to below 2.5 nats per byte, and a first generated
line.
"""

import os
import sys
from pathlib import Path

import keras
import numpy as np

import tfdist

LENGTH = 64
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 300  # `... examples/language_model.py 3000` for more

keras.utils.set_random_seed(0)
folder = Path(os.__file__).parent
text = np.frombuffer(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))), np.uint8)
starts = np.random.default_rng(0).integers(0, len(text) - LENGTH - 1, 32 * STEPS)
pieces = text[starts[:, None] + np.arange(LENGTH + 1)].astype("int32")


def transformer(width=64, blocks=2):
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(256, width)(tokens)
    x = x + keras.layers.Embedding(LENGTH, width)(keras.ops.arange(LENGTH))
    for _ in range(blocks):
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.MultiHeadAttention(4, width // 4)(y, y, use_causal_mask=True)
        y = keras.layers.LayerNormalization()(x)
        x = x + keras.layers.Dense(width)(keras.layers.Dense(4 * width, "gelu")(y))
    return keras.Model(tokens, keras.layers.Dense(256)(keras.layers.LayerNormalization()(x)))


model = transformer()
model.compile(keras.optimizers.AdamW(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
history = tfdist.fit(model, pieces[:, :-1], pieces[:, 1:], batch_size=32, epochs=1, verbose=2)
last = tfdist.evaluate(model, pieces[-256:, :-1], pieces[-256:, 1:], batch_size=64, verbose=0)

if tfdist.is_chief():
    print(f"loss {last:.2f} nats a byte")
    line = list(b"def ")
    for _ in range(40):
        logits = model(np.array([(line + [0] * LENGTH)[:LENGTH]], "int32"))[0, len(line) - 1]
        line.append(int(keras.random.categorical(logits[None] / 0.7, 1)[0, 0]))
    print(bytes(line).decode(errors="replace"))
