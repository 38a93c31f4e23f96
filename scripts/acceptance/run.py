"""python scripts/acceptance/run.py [--rehearse] [--only=NAME,...] [--out=FOLDER]: runs the stages in order.

A stage that fails, hangs or dies becomes a red row, and the other stages still run. A stage that cannot run here is a
gray row. OUT/acceptance.json and OUT/acceptance.html are rewritten after each stage, so that an interrupted
acceptance keeps its results. Exit code 1 if a stage failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.acceptance import page, stages  # noqa: E402

PASSED, FAILED, OMITTED = "passed", "failed", "left out"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, at a small size")
    parser.add_argument("--only", default="", help="names of stages; the others keep their last results")
    parser.add_argument("--out", default="runs/acceptance", help="folder of the page, the JSON and all logs")
    parser.add_argument("--torch_python", default=sys.executable, help="the Python with PyTorch")
    parser.add_argument("--jax_python", default=sys.executable, help="the Python with JAX")
    options = parser.parse_args(argv)
    out = Path(options.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    peers = {"torch": options.torch_python, "jax": options.jax_python}
    chosen = stages.stages(out, options.rehearse, peers)
    names = options.only.split(",") if options.only else [stage.name for stage in chosen]
    if unknown := sorted(set(names) - {stage.name for stage in chosen}):
        parser.error(f"--only={options.only}: no stage is called {unknown[0]}")
    return run_all([stage for stage in chosen if stage.name in names], out, options.rehearse)


def run_all(chosen: Sequence[stages.Stage], out: Path, rehearse: bool) -> int:
    """Runs the chosen stages. Returns the exit code. The page keeps the order of stages, whichever are repeated."""
    order = [stage.name for stage in stages.stages(out, rehearse, {})]
    report = _before(out) | {"machine": machine(), "rehearsal": rehearse}
    for number, stage in enumerate(chosen, 1):
        print(f"{number}/{len(chosen)} {stage.name}: {stage.shows} ...", flush=True)
        result = run(stage, out / stage.name, rehearse)
        others = [each for each in report["stages"] if each["name"] != stage.name]
        report["stages"] = sorted(
            [*others, result],
            key=lambda each: order.index(each["name"]) if each["name"] in order else len(order),
        )
        print(f"    {result['state']} in {result['seconds']:.0f} s. {result['words']}", flush=True)
        write(out / "acceptance.json", json.dumps(report, indent=1))
        write(out / "acceptance.html", page.html_of(report))
    print(f"The page: {out / 'acceptance.html'}")
    return int(any(each["state"] == FAILED for each in report["stages"]))


def _before(out: Path) -> dict[str, Any]:
    """Returns the report of an earlier call on the same folder."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((out / "acceptance.json").read_text())
    return {"stages": []}


def run(stage: stages.Stage, folder: Path, rehearse: bool) -> dict[str, Any]:
    """Runs one stage in its own process group; kills what is left of the group at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    stage.found.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(stages.REPOSITORY)} | (
        {"CUDA_VISIBLE_DEVICES": "-1"} if rehearse else {}
    )
    begun, log = time.monotonic(), folder / "output.log"
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            stage.command,
            cwd=stages.REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(stage.seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    words = lines[-1].strip()[:400] if lines else "No output."
    if code is None:
        words = f"It hung: ended after {stage.seconds:g} s. Its last output: {words}"
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError):
        rows = json.loads(stage.found.read_text())
    return {
        "name": stage.name,
        "shows": stage.shows,
        "state": {0: PASSED, stages.LEFT_OUT: OMITTED}.get(-1 if code is None else code, FAILED),
        "words": words,
        "seconds": time.monotonic() - begun,
        "rows": rows,
        "output": lines[-60:],
    }


def machine() -> dict[str, str]:
    """Returns facts about this machine and its software."""
    found = {"date": time.strftime("%Y-%m-%d %H:%M"), "processor": _processor(), "cores": str(os.cpu_count())}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        found["GPUs"] = "; ".join(answer.stdout.strip().splitlines())
    for name in ("tensorflow", "tensorflow-cpu", "keras", "nvidia-cudnn-cu12", "nvidia-nccl-cu12"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found | {"Python": platform.python_version()}


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.machine()


def write(path: Path, text: str) -> None:
    """Writes the file atomically."""
    temporary = path.with_name(f".{path.name}.writing")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
