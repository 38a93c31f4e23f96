"""Measures the memory of a worker of a mesh: ZeRO 0 to 3 on 2 and 4 workers, GPipe against 1F1B, recomputation.

    python scripts/bench_memory.py [--plot=FILE.png] [--only=TEXT]     about 12 minutes on two cores

Every row is a separate job on this machine; each worker has one thread. Columns, for rank 0, in MB (1e6 bytes):

    held        parameters + gradients kept between micro-batches + optimizer, counted from its variables and its graph
    allocated   peak of the memory that TensorFlow's allocator had given out in a step, less the amount before the model
                was built
    resident    peak of the resident memory of the process in a step (VmHWM, reset before it), less the amount before
                the model was built, less `program`
    program     the same for a twin of the job with tensors of almost no size: traced graphs, and what TensorFlow keeps
                for them
    formula     for `held`: the table in zero.py. For the peak: planner/memory.py

glibc is told to return large blocks at once (MALLOC_MMAP_THRESHOLD_); otherwise it keeps the memory of earlier steps.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.e2e.job import ENVIRONMENT  # noqa: E402

WIDE = {
    "source": "digits",
    "model": "mlp",
    "model_args": "widths=(2048,2048,2048,2048,2048)",
    "global_batch": 16,
    "accumulation": 2,
    "optimizer": "adamw",
}
TEXT = {
    "source": "synthetic",
    "source_args": "task=text,vocab=64,samples=256,eval_samples=16",
    "sequence_length": 128,
    "model": "transformer",
    "objective": "next_token",
    "optimizer": "adamw",
}
PIPED = {**TEXT, "model_args": "layers=6,width=128,heads=4", "global_batch": 32, "accumulation": 8}
DEEP = {**TEXT, "model_args": "layers=12,width=128,heads=4", "global_batch": 32}
SHORT = {"sequence_length": 4}


class Row(NamedTuple):
    """One job."""

    kind: str
    name: str
    workers: int
    options: dict
    twin: dict  # options that make its tensors small


ROWS = [
    *(
        Row(
            "zero",
            f"ZeRO-{stage} on {workers}",
            workers,
            WIDE | {"strategy": "mesh", "zero": stage},
            {"model_args": "widths=(16,16,16,16,16)"},
        )
        for workers in (2, 4)
        for stage in range(4)
    ),
    *(
        Row(
            "pipe",
            f"{schedule} on 4, 8 micro-batches",
            4,
            PIPED | {"strategy": "mesh", "mesh": "pipe=4", "pipe_schedule": schedule},
            SHORT | {"model_args": "layers=6,width=8,heads=4"},
        )
        for schedule in ("gpipe", "1f1b")
    ),
    *(
        Row(
            "recompute",
            f"recompute={kind}",
            1,
            DEEP | {"strategy": "mesh", "recompute": kind},
            SHORT | {"model_args": "layers=12,width=8,heads=4"},
        )
        for kind in ("none", "attention", "block")
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", default="", metavar="FILE.png")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="rows whose kind (zero, pipe, recompute) or name contains this"
    )
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--twin", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        row = ROWS[arguments.child]
        measure(row._replace(options=row.options | row.twin) if arguments.twin else row)
        return
    found = found_of(arguments.only)
    if arguments.plot:
        draw(found, Path(arguments.plot))


def found_of(only: str) -> dict[str, dict]:
    """Measures and prints the rows whose kind or name contains `only`. Returns name -> measurements."""
    print(
        f"{'MB of rank 0':>28}{'held':>9}{'formula':>9}{'allocated':>11}{'resident':>10}{'formula':>9}{'program':>9}",
        flush=True,
    )
    found = {}
    for number, row in enumerate(ROWS):
        if only in f"{row.kind} {row.name}":
            program = run(number, row, twin=True)["resident"]
            numbers = found[row.name] = run(number, row)
            numbers["resident"] -= program
            print(
                f"{row.name:>28}{sum(numbers['held']) / 1e6:9.1f}{sum(numbers['held_formula']) / 1e6:9.1f}"
                f"{numbers['allocated'] / 1e6:11.1f}{numbers['resident'] / 1e6:10.1f}"
                f"{numbers['peak_formula'] / 1e6:9.1f}{program / 1e6:9.1f}"
                + (f"   micro-batches held: {numbers['live']}" if numbers["live"] else ""),
                flush=True,
            )
    return found


def run(number: int, row: Row, twin: bool = False) -> dict:
    """Runs the job of a row; returns the measurements of rank 0."""
    from tfdist.launcher.local_job import LocalJob

    output = io.StringIO()
    environment = {**ENVIRONMENT, "MALLOC_MMAP_THRESHOLD_": "65536"}
    with TemporaryDirectory() as folder:
        job = LocalJob(
            [sys.executable, __file__, f"--child={number}", *(["--twin"] if twin else [])],
            row.workers,
            Path(folder),
            pin=False,
            output=output,
            environment=environment,
        )
        job.start()
        result = job.wait()
    if result.code:
        raise SystemExit(f"{row.name}: {result.cause}\n{output.getvalue()}")
    return next(
        json.loads(line.partition("measured ")[2]) for line in output.getvalue().splitlines() if "measured " in line
    )


def measure(row: Row) -> None:
    """Runs one worker: trains three steps, then measures the fourth and fifth."""
    import tensorflow as tf

    from tests.parity.mesh_worker import bytes_held
    from tfdist import build
    from tfdist.config import Config
    from tfdist.control.resolvers import resolve_cluster
    from tfdist.planner import formulas, shapes
    from tfdist.planner.hardware import DEVICES
    from tfdist.planner.layout import Layout
    from tfdist.planner.memory import memory
    from tfdist.training.parallel.pipe_schedule import live, make_schedule

    config = Config().replace(steps=10, communication="ring", **row.options)
    runtime = build.start_runtime(config, resolve_cluster(os.environ))
    allocated, resident = tf.config.experimental.get_memory_info("CPU:0")["current"], status("VmRSS")
    job = build.compose(config, runtime)
    iterators = job.iterators(0)
    job.step(iterators, 3)
    tf.config.experimental.reset_memory_stats("CPU:0")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    job.step(iterators, 2)
    peaks = {
        "allocated": tf.config.experimental.get_memory_info("CPU:0")["peak"] - allocated,
        "resident": status("VmHWM") - resident,
    }
    if runtime.rank == 0:
        piped, model = config.parallel.mesh.startswith("pipe"), formulas.shape_of(config, shapes.sample_of(config))
        layout = Layout(
            data=1 if piped else row.workers,
            pipe=row.workers if piped else 1,
            zero=config.parallel.zero,
            recompute=config.parallel.recompute == "block",
            micro_batch=job.plan.micro_batch,
            micro_batches=job.plan.accumulation,
        )
        planned = memory(model, config, layout, copies=DEVICES["cpu"].copies)
        schedule = make_schedule(config.parallel.pipe_schedule, row.workers, job.plan.accumulation) if piped else []
        held = bytes_held(job) if row.kind == "zero" else []
        print(
            "measured "
            + json.dumps(
                {
                    **peaks,
                    "held": held,
                    "held_formula": (
                        [planned.parameters, planned.gradients, planned.optimizer + planned.master] if held else []
                    ),
                    "peak_formula": 0.0 if piped or config.parallel.recompute == "attention" else planned.peak,
                    "live": live(schedule) if piped else [],
                }
            ),
            flush=True,
        )
    runtime.barrier()


def status(name: str) -> int:
    """Returns the value of a line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def draw(found: dict[str, dict], path: Path) -> None:
    """Draws bars of the memory held and of the peaks, with the formulas as lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    series = (
        ("held", "#1f5fa8", lambda row: sum(row["held"])),
        ("allocated, peak", "#d9730d", lambda row: row["allocated"]),
        ("resident, peak", "#7a7a7a", lambda row: row["resident"]),
    )
    for place, (label, colour, value) in enumerate(series):
        axes.bar(
            [number + 0.27 * (place - 1) for number in range(len(found))],
            [value(row) / 1e6 for row in found.values()],
            0.25,
            label=label,
            color=colour,
        )
    for number, row in enumerate(found.values()):
        for start, end, value in ((-0.4, -0.14, sum(row["held_formula"])), (-0.13, 0.4, row["peak_formula"])):
            if value:
                axes.hlines(
                    value / 1e6,
                    number + start,
                    number + end,
                    colors="black",
                    label="formula" if number == 0 and start == -0.4 else None,
                )
    axes.set_xticks(
        range(len(found)), [name.replace(", ", ",\n") for name in found], fontsize=8, rotation=30, ha="right"
    )
    axes.set_ylabel("MB on rank 0")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
