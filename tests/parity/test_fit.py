"""`tfdist.fit` on several workers is `model.fit` in one process: every case of fit_cases.py, every number to 1e-5."""

from __future__ import annotations

import json
import sys
import time

import pytest

from tests.e2e.job import ENVIRONMENT
from tests.parity.fit_derivative_cases import CASES
from tfdist.launcher.local_job import LocalJob

pytestmark = pytest.mark.slow

BOUND = 1e-5
UNKNOWN = "dataset_of_unknown_length"
SIMPLE = [
    "jit_compile",
    "infinite_dataset",
    *(
        f"callback_{name}"
        for name in (
            "reduce_lr_on_plateau",
            "learning_rate_scheduler",
            "csv_logger",
            "terminate_on_nan",
            "lambda",
            "history_and_progress",
            "swap_ema_weights",
            "tensorboard",
        )
    ),
]
FEW = [UNKNOWN, "dense_with_class_weights", "cnn_with_batchnorm", "last_batches_smaller_than_the_cluster"]
# Whose tensors travel another way over TensorFlow's collectives: buckets, rows of a table, rows that are not gathered,
# sums of metrics, moments, batches that leave a worker without rows.
OTHER_PATHS = [
    "last_batches_smaller_than_the_cluster",
    "cnn_with_batchnorm",
    "embeddings_eagerly_and_in_pieces",
    "large_outputs",
    "metrics_inside_the_call",
    "random_numbers_of_the_rows",
]
# run -> (workers, way of communication, cases); one worker is Keras itself, a third changes only how rows are divided,
# and what SIMPLE cases need of a worker others need, too
RUNS = {
    "1": (1, "auto", [UNKNOWN, "callbacks_that_save_and_stop"]),
    "2": (2, "auto", [name for name in CASES if name not in SIMPLE]),
    "2, more": (2, "auto", SIMPLE),
    "3": (3, "auto", FEW),
    "2, TensorFlow's": (2, "ring", OTHER_PATHS),
    "2, TensorFlow's, more": (2, "ring", [name for name in CASES if name not in OTHER_PATHS]),
    "3, TensorFlow's": (3, "ring", [*FEW, "embeddings_eagerly_and_in_pieces"]),
}
IN_DEFAULT_SUITE = ("2", "2, TensorFlow's")
PLAIN_RUNS = {"2, TensorFlow's": "2"}  # run -> another whose cases in plain Keras are these, too


class Results:
    """What the processes of a run find, case by case while they run: each test has its own time to wait.

    Args: run, of RUNS; way, see fit_worker.py.
    """

    def __init__(self, run, way, out):
        workers, _, names = RUNS[run]
        self._out, self._names, self._ended = out, names, None
        self._ranks = range(1 if way == "plain" else workers)
        self._job = LocalJob(
            [sys.executable, "-m", "tests.parity.fit_worker", str(out), way, *names],
            len(self._ranks),
            out / "logs",
            pin=False,
            environment=ENVIRONMENT,
        )
        self._job.start()

    def of(self, name):
        """[what each rank found]"""
        files = [self._out / f"{name}-{rank}.json" for rank in self._ranks]
        while not all(file.exists() for file in files):
            assert self._ended is None, (name, self._ended.cause, self._ended.last_lines)
            time.sleep(0.05)
            self._ended = self._job.poll()
        return [json.loads(file.read_text()) for file in files]

    def end(self):
        """Raises AssertionError if the processes fail after the last case."""
        if all(any(self._out.glob(f"{name}-*.json")) for name in self._names):
            ended = self._job.wait()
            assert ended.code == 0, (ended.cause, ended.last_lines)
        self._job.kill()  # not all cases were asked for
        self._job.wait()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(run, way: see fit_worker.py) -> Results"""
    found = {}

    def result(run, way):
        if (run, way) not in found:
            found[run, way] = Results(run, way, tmp_path_factory.mktemp("fit"))
        return found[run, way]

    yield result
    for each in found.values():
        each.end()


def differences(path, found, wanted):
    """Where two structures differ by more than BOUND."""
    if isinstance(wanted, dict):
        if set(found) != set(wanted):
            return [f"{path}: {sorted(found)} instead of {sorted(wanted)}"]
        return [line for key in wanted for line in differences(f"{path}.{key}", found[key], wanted[key])]
    if isinstance(wanted, list):
        if not isinstance(found, list) or len(found) != len(wanted):
            return [f"{path}: {found} instead of {wanted}"]
        return [
            line
            for index, (a, b) in enumerate(zip(found, wanted, strict=True))
            for line in differences(f"{path}[{index}]", a, b)
        ]
    if isinstance(wanted, float):
        return [] if abs(found - wanted) <= BOUND * max(1.0, abs(wanted)) else [f"{path}: {found} instead of {wanted}"]
    return [] if found == wanted else [f"{path}: {found} instead of {wanted}"]


@pytest.mark.parametrize(
    "run, name",
    [
        pytest.param(run, name, marks=[] if run in IN_DEFAULT_SUITE else [pytest.mark.thorough])
        for run, (_, _, names) in RUNS.items()
        for name in names
    ],
)
def test_like_keras_in_one_process(results, run, name):
    plain, spread = results(PLAIN_RUNS.get(run, run), "plain"), results(run, RUNS[run][1])  # at the same time
    [wanted], ranks = plain.of(name), spread.of(name)
    problems = []
    for rank, found in enumerate(ranks):
        expected = dict(wanted)
        if rank:  # what only the chief writes
            expected.pop("chief", None)
            files = found.pop("chief", None)
            assert not files or not any(files.values()), f"rank {rank} wrote {files}"
        problems += differences(f"rank {rank}", found, expected)
    assert not problems, "\n".join(problems[:20])
