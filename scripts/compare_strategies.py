"""Trains the same model on the same data with every strategy, and writes one page with plots and a table.

    python scripts/compare_strategies.py [--epochs=10] [--out=runs/strategies] [--only=multi_worker,horovod]

Every job has two workers (one process for one_device and mirrored) with one core each, the same flags, seed and global
batch. It runs in its own network namespace if the system allows that, so that the loopback counts only its bytes.
OUT/strategies.html shows throughput, loss by step and by second, staleness, final accuracy, bytes sent per step.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.e2e.job import ENVIRONMENT, records  # noqa: E402

# name -> (flags of the launcher, flags of the workers)
STRATEGIES = {
    "one_device": (["--workers=1"], ["--strategy=one_device"]),
    "mirrored, 2 CPU devices": (["--workers=1"], ["--strategy=mirrored", "--virtual_devices=2"]),
    "multi_worker": (["--workers=2"], ["--strategy=multi_worker"]),
    "multi_worker, TCP ring": (["--workers=2"], ["--strategy=multi_worker", "--communication=socket"]),
    "multi_worker, gRPC": (["--workers=2"], ["--strategy=multi_worker", "--communication=ring"]),
    "sockets": (["--workers=2"], ["--strategy=sockets"]),
    "horovod": (["--workers=2"], ["--strategy=horovod"]),
    "mesh, ZeRO 1": (["--workers=2"], ["--strategy=mesh", "--zero=1"]),
    "mesh, ZeRO 3": (["--workers=2"], ["--strategy=mesh", "--zero=3"]),
    "parameter_server, async": (["--workers=2", "--ps=1"], ["--strategy=parameter_server"]),
    "parameter_server, sync": (["--workers=2", "--ps=1"], ["--strategy=parameter_server", "--ps_mode=sync"]),
}
FLAGS = [
    "--source=digits",
    "--model=cnn",
    "--global_batch=64",
    "--learning_rate=1e-3",
    "--schedule=cosine",
    "--warmup_steps=20",
    "--nosync_batchnorm",
    "--log_every=5",
    "--eval_every=0",
    "--export=none",
    "--noplot",
    "--save_minutes=0",
    "--nosave_final",
    "--progress=none",
    "--trackers=none",
]

# Runs inside the namespace: enables loopback, runs the job, then writes the byte counter of loopback.
_INSIDE = """
import fcntl, json, socket, struct, subprocess, sys
try:
    with socket.socket() as probe:
        fcntl.ioctl(probe, 0x8914, struct.pack("16sH14x", b"lo", 0x41))  # SIOCSIFFLAGS: IFF_UP | IFF_RUNNING
except OSError:
    pass
code = subprocess.run(json.loads(sys.argv[1])).returncode
sent = next(line.split()[9] for line in open("/proc/net/dev") if line.strip().startswith("lo:"))
open(sys.argv[2], "w").write(sent)
sys.exit(code)
"""


def train(name: str, epochs: float, out: Path, isolated: bool) -> dict | None:
    """Runs one job; returns its figures, or None if it failed."""
    launcher, flags = STRATEGIES[name]
    folder = out / name.replace(", ", "-").replace(" ", "_")
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    folder.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "tfdist.launch",
        *launcher,
        "--",
        *FLAGS,
        *flags,
        f"--epochs={epochs:g}",
        f"--run_dir={folder}",
    ]
    with open(folder / "output.log", "w") as output:
        inside = [sys.executable, "-c", _INSIDE, json.dumps(command), str(folder / "bytes")]
        done = subprocess.run(
            [*(["unshare", "-rn"] if isolated else []), *inside],
            env=ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        print(f"  {name} ended with exit code {done.returncode}: see {folder / 'output.log'}", file=sys.stderr)
        return None
    trained = records(folder, kind="train")
    times = [datetime.fromisoformat(record["time"]).timestamp() for record in trained]
    steps = [record["step"] for record in trained]
    half = len(steps) // 2  # the first half contains start-up effects
    values = trained[-1]["values"]
    staleness = {
        int(key.partition("/")[2]): sum(record["values"].get(key, 0) for record in trained)
        for key in values
        if key.startswith("staleness/") and key.partition("/")[2].isdigit()
    }
    accuracy = next(
        record["values"]["eval/accuracy"] for record in reversed(records(folder)) if record["kind"] == "eval"
    )
    return {
        "name": name,
        "steps": steps,
        "seconds": [time - times[0] for time in times],
        "loss": [record["values"]["train/loss"] for record in trained],
        "steps_per_s": (steps[-1] - steps[half]) / max(times[-1] - times[half], 1e-9),
        "accuracy": accuracy,
        "staleness": staleness,
        "bytes_per_step": int((folder / "bytes").read_text()) / steps[-1] if isolated else None,
    }


def page(results: list[dict], out: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    axes[0, 0].barh([result["name"] for result in results][::-1], [result["steps_per_s"] for result in results][::-1])
    axes[0, 0].set(title="throughput", xlabel="steps per second")
    for axis, key, label in ((axes[0, 1], "steps", "step"), (axes[1, 0], "seconds", "second")):
        for result in results:
            axis.plot(result[key], result["loss"], label=result["name"], linewidth=1)
        axis.set(title=f"training loss by {label}", xlabel=label, yscale="log")
    axes[0, 1].legend(fontsize=7)
    stale = next((result for result in results if result["staleness"]), None)
    if stale:
        axes[1, 1].bar(
            list(map(str, sorted(stale["staleness"]))), [stale["staleness"][key] for key in sorted(stale["staleness"])]
        )
    axes[1, 1].set(
        title="staleness of asynchronous updates",
        xlabel="updates between reading the weights and changing them",
        ylabel="updates",
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    pyplot.close(figure)
    rows = "".join(
        f"<tr><td>{html.escape(result['name'])}<td>{result['steps_per_s']:.1f}<td>{result['loss'][-1]:.4f}"
        f"<td>{100 * result['accuracy']:.2f} %"
        f"<td>{'not measured' if result['bytes_per_step'] is None else f'''{result['bytes_per_step'] / 1e6:.2f} MB'''}"
        f"<td>{mean_staleness(result)}"
        for result in results
    )
    path = out / "strategies.html"
    path.write_text(
        f"""<!doctype html><meta charset="utf-8"><title>tfdist: strategies compared</title>
<style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em}}
table{{border-collapse:collapse}}
td,th{{padding:.3em .8em;border-bottom:1px solid #ddd;text-align:right}}
td:first-child,th:first-child{{text-align:left}}
img{{max-width:100%}}
</style>
<h1>Strategies compared</h1>
<p>The same CNN on scikit-learn's digits, the same global batch and seed; two workers with one core each.
Bytes are those on the job's loopback, acknowledgements included.</p>
<table><tr><th>strategy<th>steps/s<th>last training loss<th>accuracy<th>sent per step<th>mean staleness</tr>
{rows}</table>
<p><img alt="throughput, loss by step and by second, staleness"
src="data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}">"""
    )
    (out / "strategies.json").write_text(json.dumps(results, indent=1))
    return path


def mean_staleness(result: dict) -> str:
    total = sum(result["staleness"].values())
    return f"{sum(key * count for key, count in result['staleness'].items()) / total:.2f}" if total else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--out", default="runs/strategies")
    parser.add_argument("--only", default="", help="beginnings of names, separated by commas")
    arguments = parser.parse_args()
    out = Path(arguments.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    isolated = subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0
    names = [name for name in STRATEGIES if not arguments.only or name.startswith(tuple(arguments.only.split(",")))]
    results = []
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        if result := train(name, arguments.epochs, out, isolated):
            results.append(result)
            print(
                f"  {result['steps_per_s']:8.1f} steps/s   loss {result['loss'][-1]:.4f}   accuracy"
                f" {100 * result['accuracy']:.2f} %   {(result['bytes_per_step'] or 0) / 1e6:6.2f} MB sent per step  "
                f" mean staleness {mean_staleness(result)}",
                flush=True,
            )
    if results:
        print(f"{page(results, out)}")
    raise SystemExit(len(results) < len(names))


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent.parent)
    main()
