"""Callbacks for Keras 2 and 3: the time after every `steps_per_execution` steps of `fit`, and Keras' own snapshots."""

from __future__ import annotations

from typing import Any

from cell import Cell


def callbacks(cell: Cell, keras: Any, save_freq: int) -> list:
    """Callbacks for `fit`, in order: a window ends, then a snapshot is written. `save_freq`: as this Keras counts."""
    if not (cell.save or cell.resume):
        return [windows(cell, keras)]
    return [
        windows(cell, keras),
        keras.callbacks.BackupAndRestore(str(cell.snapshots), save_freq=save_freq, delete_checkpoint=False),
    ]


def windows(cell: Cell, keras: Any):
    """Returns a callback that turns Keras' running mean loss into window means, and stops after the last window."""

    class Windows(keras.callbacks.Callback):
        total = 0.0

        def on_train_batch_end(self, batch, logs=None):
            count = len(cell.ends) + 1
            if count == 1:
                cell.restored = int(self.model.optimizer.iterations.numpy()) - cell.steps
            mean = float(logs["loss"])
            cell.window(mean * count - self.total)
            self.total = mean * count
            self.model.stop_training = count == cell.windows

    return Windows()
