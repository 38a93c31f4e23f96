"""TensorBoard's file of events when the disk is full for a while, or somebody removes it."""

import shutil
from pathlib import Path

import pytest

from tests.unit.telemetry.test_appended_file import longest_file, train
from tfdist.telemetry.events import FanOut
from tfdist.telemetry.tensorboard import TensorBoardObserver


def found(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder)).Reload()
    return [scalar.step for scalar in accumulator.Scalars("train/loss")] if accumulator.Tags()["scalars"] else []


def test_a_disk_that_is_full_for_a_while_costs_no_value(tmp_path, capsys):
    observers = FanOut([TensorBoardObserver(tmp_path, 0)])
    observers(train(1))
    (path,) = tmp_path.iterdir()
    with longest_file(path.stat().st_size + 20):  # less than a record
        observers(train(2))
        observers(train(3))
    assert found(tmp_path) == [1]
    observers(train(4))
    observers.close()
    assert found(tmp_path) == [1, 2, 3, 4] and len(list(tmp_path.iterdir())) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"tfdist: WARNING: {path} cannot be written (File too large): its events are kept in memory until it can.",
        f"tfdist: {path} can be written again.",
    ]


def test_after_its_folder_is_removed_the_rest_is_written(tmp_path, capsys):
    folder = tmp_path / "tensorboard"
    observers = FanOut([TensorBoardObserver(folder, 0)])
    observers(train(1))
    (first,) = folder.iterdir()
    shutil.rmtree(folder)
    observers(train(2))
    observers(train(3))
    observers.close()
    (second,) = folder.iterdir()
    assert found(folder) == [2, 3] and second.name > first.name  # TensorBoard's server goes on to later names only
    assert capsys.readouterr().err.count(f"WARNING: {first} was removed or renamed: it is reopened.") == 1


def test_a_disk_that_stays_full_is_told_at_the_end(tmp_path, capsys):
    observers = FanOut([TensorBoardObserver(tmp_path, 0)])
    with longest_file(60):
        observers(train(1))
        observers.close()
    assert capsys.readouterr().err.count("TensorBoardObserver failed (OSError") == 1


def test_a_folder_that_cannot_be_made_is_told_at_once():
    with pytest.raises(OSError, match="Not a directory"):
        TensorBoardObserver(Path("/dev/null/tensorboard"), 0)
