"""Keras' layers and operations without their type annotations.

In Keras 3.15 these say that operations may return None or tensors of OpenVINO, and that initializers are str: with them
a type checker reports errors in every correct model.
"""

from __future__ import annotations

from typing import Any

import keras

layers: Any = keras.layers
ops: Any = keras.ops
