"""tfdist in the comparison: model, source and tracker for `python -m tfdist.launch`, named on the command line as by
users.

The tracker records the time of each log line. At that time the chief knows the loss of the steps since the last line,
like the peers at the end of a window. At the end, the tracker counts parameters and FLOPs of the model.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras_models import build, count, forward_flops
from workloads import CLASSES, WORKLOADS, arrays

_built: list[keras.Model] = []


def model(workload: str) -> keras.Model:
    """--model=tfdist_job:model --model_args=workload=NAME"""
    _built.append(build(WORKLOADS[workload], keras))
    return _built[-1]


def source(split: str, workload: str) -> tuple[Any, Any]:
    """--source=tfdist_job:source --source_args=workload=NAME; evaluation is not part of the measurement."""
    x, y = arrays(WORKLOADS[workload])
    return (x, y) if split == "train" else (x[:CLASSES], y[:CLASSES])


class Tracker:
    """--trackers=tfdist_job:tracker: writes rank-0.json, as cell.py does for the peers."""

    def __init__(self) -> None:
        told = json.loads(os.environ["BENCH_CELL"])
        self.path, self.batch = Path(told["folder"]) / "rank-0.json", told["batch"]
        self.ends: list[float] = []
        self.losses: list[float] = []
        self.restored = 0

    def __call__(self, event) -> None:
        if event.kind == "start":
            self.restored = event.step
        elif event.kind == "train":
            self.ends.append(event.time)
            self.losses.append(event.values["train/loss"])
        elif event.kind == "end":
            flops = forward_flops(_built[-1], self.batch) // self.batch
            self.path.write_text(
                json.dumps(
                    {
                        "ends": self.ends,
                        "losses": self.losses,
                        "parameters": count(_built[-1]),
                        "flops": flops,
                        "restored": self.restored,
                        "versions": f"Keras {keras.__version__}, TensorFlow {tf.__version__}",
                    }
                )
            )


def tracker(_) -> Tracker:
    return Tracker()
