"""The names of the models, and where their functions are. Imports no TensorFlow, so that an unknown name is reported at
once."""

from __future__ import annotations

MODELS = {
    "mlp": "tfdist.models.mlp:mlp",
    "cnn": "tfdist.models.cnn:cnn",
    "resnet50": "tfdist.models.applications:resnet50",
    "applications": "tfdist.models.applications:applications",
    "transformer": "tfdist.models.transformer:transformer",
    "vit": "tfdist.models.vit:vit",
}
