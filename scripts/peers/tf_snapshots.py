"""Snapshots of a hand-written TensorFlow loop with tf.train.CheckpointManager, as TensorFlow's guides recommend."""

from __future__ import annotations

from typing import Any

from cell import Cell


class Snapshots:
    """Saves and restores the model and its optimizer, both built. `alone`: only the chief writes. Otherwise all workers
    do, as MultiWorkerMirroredStrategy requires; the files of the others are not used."""

    def __init__(self, cell: Cell, tf: Any, model: Any, optimizer: Any, alone: bool = False):
        self.cell, self.optimizer, self.writes = cell, optimizer, not alone or cell.rank == 0
        self.checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        folder = cell.snapshots if cell.rank == 0 else cell.folder / f"of-no-use-{cell.rank}"
        self.manager = tf.train.CheckpointManager(self.checkpoint, str(folder), max_to_keep=1)
        if cell.resume:
            self.checkpoint.restore(tf.train.latest_checkpoint(str(cell.snapshots))).assert_existing_objects_matched()
            cell.restored = int(optimizer.iterations.numpy())

    def write(self) -> None:
        """Writes a snapshot after a window if one is due."""
        if self.writes and self.cell.due():
            self.manager.save(checkpoint_number=self.optimizer.iterations.numpy())
