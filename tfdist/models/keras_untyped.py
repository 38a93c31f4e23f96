"""Keras' layers and operations without their annotations.

Those of Keras 3.15 say that operations may return None or tensors of OpenVINO, and that initializers are str: a type
checker finds fault with every correct model.
"""

from __future__ import annotations

from typing import Any

import keras

layers: Any = keras.layers
ops: Any = keras.ops
