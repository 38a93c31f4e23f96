"""Callbacks that keep state, or change that of the model."""

from __future__ import annotations

import keras
import numpy as np


class Ledger(keras.callbacks.Callback):
    """Sets the learning rate of each epoch from its records. Their containers and arrays are the same object under two
    names, or were so at first."""

    def __init__(self):
        super().__init__()
        self.rows: list[list[int]] = [[]]
        self.book = {"rows": self.rows, "last": self.rows[-1]}
        self.slow = self.fast = np.ones(1)

    def on_epoch_begin(self, epoch, logs=None):
        self.fast = self.fast * 0.8
        self.slow *= 0.9
        self.book["last"].append(len(self.rows))
        weight = len(self.rows) / (1 + sum(map(len, self.book["rows"])))
        rate = self.model.optimizer.learning_rate
        rate.assign(float(rate.numpy()) * weight * float(self.slow[0] / self.fast[0]))

    def on_epoch_end(self, epoch, logs=None):
        self.rows.append([])
        self.book["last"] = self.book["rows"][-1]


class Temper(keras.callbacks.Callback):
    """Changes a plain attribute of the loss, which a step that runs eagerly sees."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.loss.scale *= 0.7
