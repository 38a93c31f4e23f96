"""The resnet50 and applications models: the image classifiers of keras.applications, with random weights.

They expect images in 0..1, as the sources give them. The first layer brings them to the scale for which the network was
made: 0..255 for networks with preprocessing inside (EfficientNet, EfficientNetV2, MobileNetV3, ConvNeXt), -1..1 for all
others.
"""

from __future__ import annotations

import inspect
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tfdist.control.exit_codes import ConfigError
from tfdist.models.inputs import float32_logits, image_input, outputs

_TAKES_0_TO_255 = ("EfficientNet", "MobileNetV3", "ConvNeXt")
_OURS = (
    "weights",
    "include_top",
    "input_tensor",
    "input_shape",
    "pooling",
    "classes",
    "classifier_activation",
    "include_preprocessing",
)


def applications(
    *, x_spec: tf.TensorSpec, num_outputs: int | None, name: str = "EfficientNetV2B0", **options: Any
) -> keras.Model:
    """Images [B, H, W, C] in 0..1 -> `keras.applications.<name>` -> logits [B, num_outputs] float32.

    `options` go to the function of keras.applications, for example alpha=0.5 of MobileNetV2.
    Raises ConfigError for a name or option that Keras does not have, x that is not an image, or no number of classes.
    """
    known = [n for n, value in vars(keras.applications).items() if inspect.isfunction(value)]
    if name not in known:
        raise ConfigError(
            f"--model=applications got name={name}, which keras.applications does not have: use one of"
            f" {', '.join(sorted(known))}."
        )
    network = getattr(keras.applications, name)
    accepted = [option for option in inspect.signature(network).parameters if option not in (*_OURS, "name")]
    for option in options:
        if option not in accepted:
            raise ConfigError(
                f"--model=applications with name={name} has no option {option!r}; it accepts"
                f" {', '.join(['name', *accepted])}."
            )
    image = image_input("applications", x_spec)
    scale, offset = (255.0, 0.0) if name.startswith(_TAKES_0_TO_255) else (2.0, -1.0)
    scaled = layers.Rescaling(scale, offset, name="from_0_to_1")(image)
    backbone = network(
        weights=None,
        include_top=True,
        input_tensor=scaled,
        input_shape=tuple(x_spec.shape),
        classes=outputs("applications", num_outputs),
        classifier_activation=None,
        **options,
    )
    return keras.Model(image, float32_logits(backbone.output, "float32_logits"), name=backbone.name)


def resnet50(*, x_spec: tf.TensorSpec, num_outputs: int | None) -> keras.Model:
    """ResNet-50 (He et al. 2015, arXiv:1512.03385): images [B, H, W, C] in 0..1 -> logits [B, num_outputs] float32.

    Images need sides of at least 32: the network makes them 32 times smaller. 25,636,712 parameters with 3 channels and
    1000 classes. Raises ConfigError if x is not an image, or there is no number of classes.
    """
    return applications(x_spec=x_spec, num_outputs=num_outputs, name="ResNet50")
