r"""Fine-tunes a KerasHub backbone (pip install keras-hub) to tell comments from other lines of Python.

    source scripts/environment.sh && python -m tfdist.launch --workers=2 -- \
      --model=examples/finetune_kerashub.py:model --source=examples/finetune_kerashub.py:data --global_batch=32 \
      --steps=200 --learning_rate=1e-3 --run_dir=runs/finetune

Expected, in two minutes on two cores: an accuracy of at least 0.75 in the evaluation at the end (guessing gives 0.5),
starting from random weights. --model_args=preset=bert_tiny_en_uncased downloads trained weights instead; `data` must
then use the preset's tokenizer.
"""

import os
from pathlib import Path

import keras
import numpy as np

LENGTH = 48


def model(num_outputs, preset=""):
    """A classifier on top of BERT."""
    try:
        import keras_hub
    except ImportError as error:
        raise ImportError("this example needs KerasHub: pip install keras-hub") from error
    if preset:
        backbone = keras_hub.models.BertBackbone.from_preset(preset)
    else:
        backbone = keras_hub.models.BertBackbone(
            vocabulary_size=256,
            num_layers=2,
            num_heads=2,
            hidden_dim=32,
            intermediate_dim=128,
            max_sequence_length=LENGTH,
        )
    tokens = keras.Input((LENGTH,), dtype="int32")
    inputs = {
        "token_ids": tokens,
        "padding_mask": keras.ops.not_equal(tokens, 0),
        "segment_ids": keras.ops.zeros_like(tokens),
    }
    return keras.Model(tokens, keras.layers.Dense(num_outputs)(backbone(inputs)["pooled_output"]))


def data(split):
    """Returns the bytes of lines, without a leading # and padded with 0, and whether each line began with a #."""
    names = sorted(Path(os.__file__).parent.glob("*.py"))[split == "train" :: 2]
    lines = [line.strip() for name in names for line in name.read_bytes().splitlines()]
    comments = [line.lstrip(b"# ") for line in lines if line.startswith(b"# ")][:2000]
    code = [line for line in lines if line and not line.startswith(b"#")][: len(comments)]
    x = np.zeros((2 * len(comments), LENGTH), "int32")
    for row, line in enumerate(comments + code):
        x[row, : len(line)] = list(line[:LENGTH])
    return x, np.repeat(np.array([1, 0], "int32"), len(comments))
