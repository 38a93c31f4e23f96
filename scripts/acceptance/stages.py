"""The stages of the acceptance: what each one shows, its command and its time limit."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
LEFT_OUT = 77  # exit code of a stage that cannot run here; its last line of output says why


@dataclass(frozen=True)
class Stage:
    """Passes with exit code 0. The command may write its results to `found`, a JSON list of rows (dicts)."""

    name: str
    shows: str
    command: tuple[str, ...]
    seconds: float  # time limit; the stage is then killed
    found: Path


def stages(out: Path, rehearse: bool, peers: dict[str, str]) -> list[Stage]:
    """Returns the stages in the order in which they run. peers: "torch", "jax" -> the Python that has the package."""
    python, small = sys.executable, ["--rehearse"] if rehearse else []

    def stage(name: str, shows: str, seconds: float, *command: str) -> Stage:
        return Stage(name, shows, tuple(command), seconds, out / name / "found.json")

    def own(name: str, shows: str, seconds: float) -> Stage:
        return stage(name, shows, seconds, python, str(HERE / f"{name}.py"), str(out / name), *small)

    speed = [python, str(HERE.parent / "bench_gpu.py"), f"--out={out / 'speed'}", "--windows=3", *small]
    speed += [f"--{kind}_python={path}" for kind, path in peers.items()]
    return [
        stage("doctor", "the machine is fit", 400, python, "-m", "tfdist.doctor", f"--run_dir={out / 'doctor'}"),
        own("parity", "one step of every model and precision, on the GPU as on the CPU", 420),
        own("attention", "cuDNN's attention is the formula's", 180),
        own("lookups", "lookups of rows that do not exist are NaN or an error", 180),
        own("resume", "a run that is killed ends, bit for bit, where an undisturbed one ends", 180),
        own("workers", "two workers (by NCCL, where there are two GPUs) compute what one does", 240),
        own("fuzzed", "drawn combinations compute on the GPU what plain Keras does on the CPU", 400),
        own("ways", "BatchNormalization as one operation or several, with XLA or without", 240),
        own("stalls", "what a snapshot and the input pipeline cost", 240),
        stage("speed", "GPT-2 124M and ResNet-50 beside PyTorch and JAX", 900, *speed),
    ]
