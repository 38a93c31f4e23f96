"""The base class of the callbacks that tfdist.fit adds to those that it is given."""

from __future__ import annotations

from typing import Any

import keras


class FitCallback(keras.callbacks.Callback):
    """A callback that is used only while `fit` runs, when Keras has given it a model and parameters."""

    @property
    def fitted(self) -> Any:
        """The model that is being fitted."""
        assert self.model is not None
        return self.model

    @property
    def epochs(self) -> int:
        """The number of epochs at which the fit ends."""
        assert self.params is not None
        return self.params["epochs"]
