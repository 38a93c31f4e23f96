"""Tests whether the fuzzer finds what it is for: puts faults into a copy of the code, one at a time, and runs it there.

    python -m tests.fuzz.faults            all of FAULTS; some: their names
    python -m tests.fuzz.faults --list

A fault counts as found if a case shows a difference with the fault and none without it. Exit code 1 if a fault was not
found within five minutes of one core.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.e2e.job import ENVIRONMENT
from tests.faulty_copy import REPOSITORY, faulty_copy

MINUTES = 5.0


class Fault(NamedTuple):
    """In `file` below tfdist, `text` becomes `other`. runtimes: where the fuzzer looks for it, of the affected ones."""

    file: str
    text: str
    other: str
    runtimes: str
    what: str


FAULTS: dict[str, Fault] = {
    "remainder": Fault(
        "data/batch_plan.py",
        "start + (replica + 1) * size // self.replicas",
        "start + replica * size // self.replicas + size // self.replicas",
        "mirrored,sockets:2,mesh:2",
        "the samples that are left over when a batch does not divide are trained on by nobody",
    ),
    "duplicates": Fault(
        "training/table_rows.py",
        "table.scatter_sub(tf.IndexedSlices(tf.cast(values, table.dtype), rows))",
        "table.scatter_update(tf.IndexedSlices(tf.gather(table, rows) - tf.cast(values, table.dtype), rows))",
        "fit:2,mirrored:2,sockets:2",
        "of the gradients of a row that is looked up twice one is lost",
    ),
    "servers_float32": Fault(
        "training/parameter_server/slice_values.py",
        "tf.float32 if dtype.is_floating and dtype.size < 4 else dtype",
        "tf.float32",
        "parameter_server:2",
        "what layers keep in whole numbers travels to parameter servers in float32",
    ),
    "clip": Fault(
        "training/update.py",
        "tf.maximum(norm, limit)",
        "tf.maximum(norm * 1.001, limit)",
        "one_device,mirrored:2",
        "clipping shortens gradients by 0.1 % too much",
    ),
    "accumulation": Fault(
        "training/replica_gradients.py",
        "lambda a, b: a + b, accumulated, more)",
        "lambda a, b: a + b, accumulated, more)._replace(sums=more.sums)",
        "one_device,mirrored:2",
        "of the weights of several micro-batches only the last ones count",
    ),
    "averages": Fault(
        "training/update.py",
        "averages = ema_variables(self.optimizer)",
        "averages = []",
        "one_device,mirrored:2,sockets:2",
        "evaluation takes the weights and not their moving averages",
    ),
    "statistics": Fault(
        "runtime/batch_norm.py",
        "share = tf.math.divide_no_nan(counts, tf.reduce_sum(counts, 0))",
        "share = tf.ones_like(counts) / runtime.size",
        "sockets,fit",
        "each worker's rows count alike in the statistics of BatchNormalization, however many they are",
    ),
    "gathered": Fault(
        "keras_fit/rows.py",
        "start + count, count) * tf.cast(runtime.size, grad.dtype)",
        "start + count, count) * tf.cast(1, grad.dtype)",
        "fit:2,fit:3",
        "gradients through gathered rows are N times too small",
    ),
    "slots": Fault(
        "artifacts/state.py",
        "        tf_variable(variable).assign(arrays[key])",
        '        if key != "optimizer/0002":\n            tf_variable(variable).assign(arrays[key])',
        "one_device,mirrored:2,sockets:2",
        "a restored run begins with a momentum of 0 for one variable",
    ),
    "warmup": Fault(
        "training/schedule.py",
        "warmup = (step + 1) / max(self.warmup_steps, 1)",
        "warmup = (step + 0.99) / max(self.warmup_steps, 1)",
        "one_device,mirrored:2",
        "the learning rate of the warm-up is 1 % too small",
    ),
    "skipping": Fault(
        "training/step.py",
        "        if self._may_skip:\n            tf.cond(",
        "        if False:\n            tf.cond(",
        "one_device,mirrored:2",
        "a step with a NaN is applied although it should be skipped",
    ),
    "metrics": Fault(
        "keras_fit/own_rows.py",
        "variable.assign(old + more)",
        "variable.assign(more)",
        "fit:2,fit:3",
        "where only the own rows are computed, metrics forget the batches before",
    ),
    "sums": Fault(
        "keras_fit/rows.py",
        "(weight if how.reduction == SUM else share)",
        "share",
        "fit:2",
        "losses that a model adds as sums over rows count as if they were means",
    ),
    "noise": Fault(
        "keras_fit/random_numbers.py",
        "take_the_chiefs(self._runtime, [generator.state])",
        "pass",
        "fit:2",
        "each worker draws random numbers of its own in a train_step",
    ),
    "contents": Fault(
        "data/contents.py",
        "    if not _others(_gathered(runtime, split, found)):",
        "    if split.size:",
        "sockets:2",
        "workers that hold different samples are not noticed",
    ),
    "drift": Fault(
        "runtime/weight_check.py",
        "    if different:",
        "    if len(different) > 1:",
        "mirrored:2",
        "one variable that differs between replicas is not noticed",
    ),
    "shard_upload": Fault(
        "artifacts/partial_download.py",
        "for step in filter(scheduled, reversed(self._remote.steps())):",
        "for step in filter(scheduled, self._remote.steps()):",
        "mesh:2",
        "of divided state in an object store the oldest snapshot is restored, not the newest",
    ),
    "byte_ranges": Fault(
        "data/sources/stored_records.py",
        "offset, end = int(self.offsets[row]), int(self._ends[row])",
        "offset, end = (int(each[max(row - 1, near[0])]) for each in (self.offsets, self._ends))",
        "one_device,mirrored:2,sockets:2",
        "of records that are read by one byte range of an object each is taken for the one after it",
    ),
    "rollback": Fault(
        "artifacts/restore.py",
        'if not config.run.deterministic or config.loop.on_nan != "rollback":',
        "if True:",
        "one_device,mirrored:2",
        "a run that was stopped goes back to the snapshot of the stop, which an uninterrupted one does not have",
    ),
    "clock": Fault(
        "run/session_hooks.py",
        "past = period_end if restore.scheduled(self.recovery.job.config).periods else step",
        "past = step",
        "one_device,mirrored:2",
        "how far a run goes past bad numbers hangs on how fast its steps are",
    ),
    "best": Fault(
        "artifacts/policy.py",
        "if math.isfinite(score)}  # NaN is no best",
        "}",
        "one_device,mirrored:2",
        "an evaluation that came to NaN may be the best",
    ),
    "other_batch": Fault(
        "run/progress.py",
        'self._skipped = manifest["consumed"] - step * self.global_batch',
        'self._skipped = manifest["skipped_samples"]',
        "one_device,mirrored:2",
        "a run that goes on with another batch begins at another sample than it had come to",
    ),
    "configuration": Fault(
        "artifacts/restore.py",
        'if manifest["config_digest"] == config.digest() or config.checkpoint.allow_config_change:',
        "if True:",
        "one_device,mirrored:2",
        "a run goes on with other flags although nobody has allowed it",
    ),
    "left_out": Fault(
        "training/parallel/sharded_state.py",
        "piece.value.assign(piece.read(prefix, key))",
        'piece.value.assign(piece.read(prefix, key) * (key != "optimizer/0002"))',
        "mesh:2",
        "a run on a mesh that goes on, or without its compression, begins with a momentum of 0 for one variable",
    ),
    "own_files": Fault(
        "data/streams.py",
        "numbered = _shard(split, reading, replica, cut, consumed // cut)",
        "numbered = _shard(split, reading, replica, cut, consumed)",
        "multi_worker:2,mirrored:2",
        "where each worker reads its own files, a run that goes on skips too many samples",
    ),
    "mask": Fault(
        "training/objectives.py",
        "    if w.shape.rank == losses.shape.rank:\n        return w",
        "    if w.shape.rank == losses.shape.rank and w.shape.rank == 1:\n        return w\n    if w.shape.rank == 2:\n"
        "        w = tf.reduce_mean(w, 1)",
        "one_device,mirrored:2",
        "the weights of tokens become weights of their sequences",
    ),
}


def find(name: str) -> tuple[str, float]:
    """Returns (the case that shows a fault, or "" if none did, core seconds until then)."""
    fault, begun, seed = FAULTS[name], _core_seconds(), 0
    with faulty_copy(fault.file, fault.text, fault.other) as copy:
        while (left := MINUTES - (_core_seconds() - begun) / 60) > 0:
            seed += 1
            said = _fuzz(
                copy,
                "--until_first",
                "--shrink_seconds=0",
                f"--seed={seed}",
                "--minutes=60",
                f"--core_minutes={left}",
                f"--runtimes={fault.runtimes}",
            )
            seconds = _core_seconds() - begun
            case = re.search(r"--replay='(.*)'", said.stdout)
            if case and _fuzz(REPOSITORY, f"--replay={case[1]}").returncode == 0:
                return case[1], seconds
    return "", _core_seconds() - begun


def _core_seconds() -> float:
    """Returns the core seconds of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _fuzz(folder: Path, *flags: str) -> subprocess.CompletedProcess:
    environment = {**ENVIRONMENT, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "scripts/fuzz.py", *flags], cwd=folder, env=environment, capture_output=True, text=True
    )


def main(names: list[str]) -> int:
    if names == ["--list"]:
        print("\n".join(f"{name}: {fault.what} ({fault.file})" for name, fault in FAULTS.items()))
        return 0
    missed = 0
    for name in names or FAULTS:
        case, seconds = find(name)
        missed += not case or seconds > MINUTES * 60
        print(
            f"{name}: {FAULTS[name].what}: {'found' if case else 'NOT found'} in {seconds:.0f}"
            f" s{f' by {case}' if case else ''}",
            flush=True,
        )
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
