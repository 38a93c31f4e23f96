"""Shared code of the stages: training runs as processes, and how a stage ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from scripts.acceptance.stages import LEFT_OUT
from tfdist.control.machine_shares import visible_gpus

QUIET = ("--eval_every=-1", "--export=none", "--noplot", "--progress=none", "--trackers=none")
IMAGES = ("--source=synthetic", "--source_args=task=image,shape=(32,32,3),classes=10")
LARGE_IMAGES = ("--source=synthetic", "--source_args=task=image,fixed=True")
TEXT = ("--source=synthetic", "--source_args=task=text,vocab=300", "--sequence_length=64", "--objective=next_token")
TRANSFORMER = ("--model=transformer", "--model_args=layers=2,width=64,heads=4")


def gpus() -> list[str]:
    """Returns the names of the GPUs that may be used, as in CUDA_VISIBLE_DEVICES."""
    return visible_gpus(os.environ)


def run(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess:
    """Runs the command; its output goes to the stage's log."""
    return subprocess.run(command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL)


def train(flags: Sequence[str], run_dir: Path, launch: Sequence[str] = (), **environment: str) -> int:
    """Runs tfdist.train, or several workers with `launch` (flags of the launcher). Returns the exit code."""
    start = ["tfdist.launch", *launch, "--"] if launch else ["tfdist.train"]
    return run([sys.executable, "-m", *start, *QUIET, *flags, f"--run_dir={run_dir}"], **environment).returncode


def train_well(flags: Sequence[str], run_dir: Path, launch: Sequence[str] = (), **environment: str) -> None:
    """Like `train`, but removes `run_dir` first, and ends the stage if the training fails."""
    shutil.rmtree(run_dir, ignore_errors=True)
    if code := train(flags, run_dir, launch, **environment):
        fail(f"{run_dir.name}: a training ended with exit code {code}: {' '.join(flags)}")


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Returns the values that the chief has logged, each with its step."""
    lines = (run_dir / "logs" / "rank-0.jsonl").read_text().splitlines()
    return [each["values"] | {"step": each["step"]} for each in map(json.loads, lines) if each["kind"] == kind]


def write_rows(out: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes the rows that the page shows for the stage."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "found.json").write_text(json.dumps(list(rows)))


def fail(words: str) -> NoReturn:
    print(words, flush=True)
    sys.exit(1)


def leave_out(why: str) -> NoReturn:
    print(why, flush=True)
    sys.exit(LEFT_OUT)
