"""Weak scaling to 1024 workers, on paper: the planner's prediction from latency and bandwidth measured on this machine.

    python scripts/bench_scale.py [--out=runs/scale] [--repeats=9]        about 3 minutes on two idle cores

1. `tfdist.comm` measures our ring over TCP between 2 workers. Its fitted line a + S / b gives alpha and beta of the
   link.
2. Two runs of one worker (micro-batch 8 and 24; a transformer of 10.8M parameters, 128 tokens) give the speed of
   computation and the fixed cost of a step.
3. `tfdist.plan` predicts step time and efficiency of data parallelism at 2 to 1024 workers: on links as measured and
   on two common networks, with micro-batches of 8 and 64.
4. Two workers are measured, too, as a check of the first row.

Prints a table and the assumptions, and draws OUT/scale.png.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench_planner import BARE, train  # adds the repository to sys.path

from tests.e2e.job import ENVIRONMENT
from tfdist.communication.alpha_beta import fit_line
from tfdist.communication.measurement import Measurement
from tfdist.planner.hardware import NETWORKS

TRAIN = [*BARE, "--sequence_length=128", "--model_args=layers=6,width=384,heads=6", "--steps=24", "--log_every=4"]
SHOWN = (2, 8, 64, 512, 1024)
MICRO_BATCHES = (8, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/scale", type=Path)
    parser.add_argument("--repeats", default=9, type=int)
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)

    alpha, beta = link(out, arguments.repeats)
    print(
        f"measured: alpha {alpha * 1e6:.0f} us, beta {beta / 1e9:.2f} GB/s in one direction (our ring over TCP, 2"
        " workers, one core each)",
        flush=True,
    )
    calibration, alone = zip(
        *(train(out, 1, batch, [*TRAIN, "--strategy=one_device"]) for batch in (8, 24)), strict=True
    )
    _, both = train(out, 2, 16, [*TRAIN, "--communication=socket"])
    for name, seconds in (("1 worker", alone[0]), ("2 workers", both)):
        print(f"measured: {name}, micro-batch 8: {seconds * 1e3:.0f} ms a step", flush=True)

    links = {
        "as measured": (beta / 1e9, alpha * 1e6),
        **{name: NETWORKS[name] for name in ("ethernet-10", "ethernet-100")},
    }
    rows = {
        (name, batch): scaling(gbs, us, batch, calibration)
        for name, (gbs, us) in links.items()
        for batch in MICRO_BATCHES
    }
    print(
        "\n| link | micro-batch | "
        + " | ".join(f"{devices} workers" for devices in SHOWN)
        + " |\n|---|---|"
        + "---|" * len(SHOWN)
    )
    for (name, batch), found in rows.items():
        print(f"| {name} | {batch} | " + " | ".join(f"{found[devices]:.2f}" for devices in SHOWN) + " |")
    print(
        f"\ncheck: efficiency of 2 workers with micro-batch 8, measured {alone[0] / both:.2f}, predicted"
        f" {rows['as measured', 8][2]:.2f}"
    )
    print(
        "assumed: one worker a host, all links alike and used by nobody else; a ring or what is faster (tree, halving"
        " and doubling), latency the same at any distance; nothing hides communication, which on a CPU takes the core"
        " that computes; no stragglers, failures or reading of data; gradients in float32."
    )
    draw(rows, out / "scale.png")


def link(out: Path, repeats: int) -> tuple[float, float]:
    """Returns (alpha in seconds, beta in bytes per second) of a link of the ring, from the fit of its all-reduces."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "tfdist.comm",
            "--workers=2",
            "--runtimes=multi_worker:socket",
            "--collectives=all_reduce",
            "--largest=67108864",
            "--factor=4",
            f"--repeats={repeats}",
            f"--out={out / 'comm'}",
        ],
        env=ENVIRONMENT,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with open(next((out / "comm").glob("*-2.csv")), encoding="utf-8") as file:
        found = [
            Measurement(row["collective"], 2, int(row["bytes"]), float(row["seconds"])) for row in csv.DictReader(file)
        ]
    line = fit_line(found)
    largest = max(one.size for one in found)
    beta = largest / (line.seconds(largest) - line.alpha)  # over all sizes, the knee included
    return line.alpha / 2, beta  # a ring of 2 takes 2 alpha + S / beta


def scaling(gbs: float, us: float, batch: int, calibration: Sequence[str]) -> dict[int, float]:
    """Returns workers -> efficiency relative to one worker, by the planner."""
    command = [
        sys.executable,
        "-m",
        "tfdist.plan",
        "--devices=1024",
        "--mesh=data=1024",
        "--zero=0",
        "--recompute=none",
        f"--hardware=cpu,memory_gb=64,overlap=0,network_gbs={gbs},network_us={us}",
        *(f"--calibrate={run_dir}" for run_dir in calibration),
        "--json=-",
        "--",
        *TRAIN,
        f"--global_batch={1024 * batch}",
        "--accumulation=1",
    ]
    told = json.loads(subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout)
    return {row["devices"]: row["efficiency"] for row in told["scaling"]}


def draw(rows: dict[tuple[str, int], dict[int, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (name, batch), found in rows.items():
        axis.plot(
            list(found),
            list(found.values()),
            "-" if batch == MICRO_BATCHES[0] else "--",
            marker=".",
            label=f"{name}, micro-batch {batch}",
        )
    axis.set(xscale="log", xlabel="workers", ylabel="efficiency", ylim=(0, 1.05), title="weak scaling, predicted")
    axis.set_xticks(SHOWN, SHOWN)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
