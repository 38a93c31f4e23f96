"""Names of the augmentations and where their functions are. No TensorFlow: an unknown name is reported at once."""

from __future__ import annotations

AUGMENTATIONS = {
    "none": "",
    "flip": "tfdist.data.augment:flip",
    "flip_crop": "tfdist.data.augment:flip_crop",
    "random_resized_crop": "tfdist.data.augment:random_resized_crop",
    "shift": "tfdist.data.augment:shift",
}
