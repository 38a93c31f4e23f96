"""Compares tfdist with its alternatives: the same models on the same data, measured in one run on this machine.

    python scripts/bench_peers.py [--resume] [--quick] [--only=transformer10m,PyTorch] [--modes=1,2,2s,1c,2c,1r,2r]
    [--rounds=1]
                                  [--out=runs/peers] [--venvs=~/.cache/tfdist-bench] [--prepare] [--report]

Peers: Keras 3 fit, tf-keras fit under MultiWorkerMirroredStrategy, Horovod, Orbit, PyTorch DistributedDataParallel
(scripts/peers/). They run in virtual environments that the first call creates (about 4 GB in all) with pip as it is
configured. Each worker has one core and one thread; all use float32 and the same batches and initial weights. A row is
printed only if its parameters, its FLOPs and the loss of its first window agree with the others. Needs two cores that
are otherwise idle.

Every measurement is a fresh start: two warm-up windows, then at least five that count (one in modes 1r and 2r). Engines
take turns within a workload, so that slow drifts of the machine affect all. Each result is written at once
(OUT/cells/*.json); OUT/peers.md and OUT/peers.png follow at the end. --resume keeps existing results that were measured
with the same settings. --only: parts of names of workloads and engines; a measurement must match one of the workloads
and one of the engines, if any are named. --rounds=N: N fresh starts each.
--modes: 1 and 2 workers, 2s with half the batch each, 1c and 2c with snapshots, 1r and 2r resuming from those.
Snapshots are written as each engine's own guide recommends; tfdist flushes them to the disk, the others do not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
import environments  # noqa: E402

KEPT = (
    "run/checkpoints",
    "snapshots",
)  # where tfdist and the others leave snapshots, in the folder of a measurement
LONGEST = 420.0  # seconds that one measurement may take
SNAPSHOTS = 5  # counted snapshots of a measurement with snapshots
LOOK_EVERY = 0.5  # seconds between two readings of the processes' memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", default="", help="folder of the results (default runs/peers, with --quick runs/peers-quick)"
    )
    parser.add_argument("--venvs", default="~/.cache/tfdist-bench", help="folder of the environments")
    parser.add_argument(
        "--torch",
        default="torch==2.13.0",
        help="requirement for pip; on a machine without GPUs choose a CPU build (default %(default)s)",
    )
    parser.add_argument("--only", default="", help="parts of names of workloads and engines, separated by commas")
    parser.add_argument(
        "--modes", default="1,2,2s,1c,2c,1r,2r", help="which numbers of workers, and what they do (default all)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="fresh starts of each measurement")
    parser.add_argument("--resume", action="store_true", help="keep existing measurements")
    parser.add_argument(
        "--quick", action="store_true", help="one window of one step: whether everything runs; the figures mean nothing"
    )
    parser.add_argument("--prepare", action="store_true", help="only create the environments")
    parser.add_argument("--report", action="store_true", help="only write the report of what has been measured")
    arguments = parser.parse_args()
    venvs = Path(arguments.venvs).expanduser().resolve()
    out = Path(arguments.out or ("runs/peers-quick" if arguments.quick else "runs/peers")).resolve()
    recipes = environments.recipes(arguments.torch)
    if reason := environments.make("tfdist", recipes["tfdist"], venvs):
        raise SystemExit(f"bench_peers: tfdist cannot be measured: {reason}.")
    if Path(sys.prefix).resolve() != venvs / "tfdist":  # NumPy and Matplotlib are there
        own = str(venvs / "tfdist" / "bin" / "python")
        os.execv(own, [own, *sys.argv])

    plans = selection(arguments)
    wanted = {plan.engine.environment for plan in plans}
    missing = {
        name: reason
        for name, recipe in recipes.items()
        if name in wanted and (reason := environments.make(name, recipe, venvs))
    }
    for name, reason in missing.items():
        print(f"bench_peers: {name} is left out: {reason}.", file=sys.stderr)
    if arguments.prepare:
        raise SystemExit(bool(missing))
    (out / "cells").mkdir(parents=True, exist_ok=True)
    (out / "missing.json").write_text(json.dumps(missing))
    if not arguments.report:
        measure_all([plan for plan in plans if plan.engine.environment not in missing], venvs, out, arguments.resume)
    import report

    print(report.write(out))


def selection(arguments: argparse.Namespace) -> list:
    """Returns the measurements in order: engines are adjacent within a workload, a round and a number of workers."""
    from engines import ENGINES, MODES
    from workloads import WORKLOADS

    parts = [part.strip().lower() for part in arguments.only.split(",") if part.strip()]
    workloads = [name for name in WORKLOADS if any(part in name for part in parts)] or list(WORKLOADS)
    engines = [name for name in ENGINES if any(part in name.lower() for part in parts)] or list(ENGINES)
    unknown = [part for part in parts if not any(part in name.lower() for name in (*WORKLOADS, *ENGINES))]
    if unknown:
        raise SystemExit(
            f"bench_peers: --only={arguments.only}: {unknown[0]!r} is in no name: use parts of"
            f" {', '.join((*WORKLOADS, *ENGINES))}."
        )
    modes = arguments.modes.split(",")
    if not set(modes) <= set(MODES):
        raise SystemExit(f"bench_peers: --modes={arguments.modes} must be some of {', '.join(MODES)}.")
    plans = []
    for workload in (WORKLOADS[name] for name in workloads):
        plans += [
            make_plan(workload, ENGINES[name], mode, number, arguments.quick)
            for number in range(arguments.rounds)
            for mode in modes
            for name in engines
            if mode in ENGINES[name].modes
            and workload.kind in ENGINES[name].kinds
            and (workload.save_steps or mode[-1] not in "cr")
        ]
    return plans


def make_plan(workload, engine, mode: str, number: int, quick: bool):
    """Returns the plan of one measurement.

    With snapshots, it is SNAPSHOTS + 1 blocks long: the first block warms up; the snapshot after the last block does
    not count.
    """
    from cell import BLOCK
    from engines import WARM_UP, Plan

    blocks = 2 if quick else SNAPSHOTS + 1
    if mode[-1] in "cr":
        steps = 1 if quick else workload.save_steps
        return Plan(
            workload,
            engine,
            mode,
            number,
            steps,
            BLOCK * blocks - WARM_UP if mode.endswith("c") else 1,
            BLOCK * blocks * steps if mode.endswith("r") else 0,
        )
    return Plan(workload, engine, mode, number, *((1, 1) if quick else (workload.steps, workload.windows)))


def measure_all(plans: list, venvs: Path, out: Path, resume: bool) -> None:
    signal.signal(signal.SIGTERM, _stop)
    begun = time.monotonic()
    for number, plan in enumerate(plans, 1):
        path = out / "cells" / f"{plan.name}.json"
        if resume and path.exists():
            found = json.loads(path.read_text())
            if "error" not in found and found["settings"] == plan.settings():
                continue
        result = measure(plan, venvs, out / "cells" / plan.name)
        if plan.origin and "error" not in result:
            for name in KEPT:  # these take gigabytes
                shutil.rmtree(out / "cells" / plan.origin / name, ignore_errors=True)
        path.with_suffix(".part").write_text(json.dumps(result, indent=1))
        path.with_suffix(".part").rename(path)
        shown = (
            result.get("error")
            or f"{result['median']:8.3f} steps/s, first step after {result['startup_s']:.1f} s,"
            f" {result['peak_mb']:.0f} MB"
        )
        print(
            f"[{number}/{len(plans)}, {(time.monotonic() - begun) / 60:.1f} min] {plan.workload.name}, {plan.mode:>2},"
            f" {plan.engine.name}: {shown}",
            file=sys.stderr,
            flush=True,
        )


def _stop(*_) -> None:
    """Exits by an exception, so that running processes are ended, too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def measure(plan, venvs: Path, folder: Path) -> dict:
    """Measures one fresh start, and watches it to its end."""
    from engines import commands

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    result = {"settings": plan.settings(), "load": os.getloadavg()[0], "time": time.time()}
    if plan.origin and not any((folder.parent / plan.origin / name).is_dir() for name in KEPT):
        return {
            **result,
            "error": f"no snapshot to resume from: measure {plan.mode.replace('r', 'c')} again, without --resume",
        }
    cores = sorted(os.sched_getaffinity(0))
    processes, started = [], time.time()
    with open(folder / "output.log", "w", encoding="utf-8") as output:
        for command, environment, own in commands(plan, venvs, folder, cores):
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=lambda own=own: os.sched_setaffinity(0, own),
                )
            )
        error, peak = watch(processes)
    if error:
        return {**result, "error": f"{error}; see {folder / 'output.log'}: {last_line(folder / 'output.log')}"}
    try:
        return {**result, "peak_mb": peak / 1024, **figures(plan, folder, started)}
    except (OSError, ValueError, KeyError) as problem:
        return {**result, "error": f"its figures cannot be read ({problem}); see {folder / 'output.log'}"}


def watch(processes: list[subprocess.Popen]) -> tuple[str, int]:
    """Waits for all processes. Returns (what went wrong or "", the peak resident memory of any process in kB)."""
    peak, deadline, error = 0, time.monotonic() + LONGEST, ""
    own: set[int] = set()
    try:
        while any(process.poll() is None for process in processes):
            own = descendants({process.pid for process in processes})
            peak = max([peak, *map(high_water, own)])
            failed = [process.returncode for process in processes if process.poll()]
            if failed or time.monotonic() > deadline:
                error = f"a process ended with code {failed[0]}" if failed else f"it did not end within {LONGEST:.0f} s"
                break
            time.sleep(LOOK_EVERY)
        failed = [process.returncode for process in processes if process.poll()]
        return error or (f"a process ended with code {failed[0]}" if failed else ""), peak
    finally:
        for pid in own | descendants({process.pid for process in processes if process.poll() is None}):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in processes:
            process.wait()


def descendants(roots: set[int]) -> set[int]:
    """Returns the given processes and all their descendants, as far as they still run."""
    parents = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parents[int(entry.name)] = int(Path(entry.path, "stat").read_text().rpartition(")")[2].split()[1])
    found, new = set(), {pid for pid in roots if pid in parents}
    while new:
        found |= new
        new = {pid for pid, parent in parents.items() if parent in new} - found
    return found


def high_water(pid: int) -> int:
    """Returns the peak resident memory of a process so far, in kB."""
    with contextlib.suppress(OSError, StopIteration):
        return int(
            next(
                line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")
            ).split()[1]
        )
    return 0


def figures(plan, folder: Path, started: float) -> dict:
    """Computes results from the workers' records. tfdist's chief writes one for all, a peer's worker its own."""
    import statistics

    from engines import WARM_UP

    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    if len(ranks) != (plan.world if plan.engine.script else 1):
        raise ValueError(f"{len(ranks)} of {plan.world} workers left a result")
    ends = ranks[0]["ends"]
    if len(ends) != plan.windows + WARM_UP:
        raise ValueError(f"{len(ends)} windows instead of {plan.windows + WARM_UP}")
    rates = [plan.steps / (end - begin) for begin, end in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]
    median = statistics.median(rates)
    if ranks[0]["restored"] != plan.newest:
        raise ValueError(f"it resumed from step {ranks[0]['restored']} instead of {plan.newest}")
    return {
        "steps_per_s": rates,
        **(snapshots(folder, ends) if plan.saves else {}),
        "median": median,
        "restored": plan.newest,
        "startup_s": ends[0] - started - (plan.steps - 1) / median,
        "losses": [statistics.mean(losses) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)],
        "parameters": ranks[0]["parameters"],
        "flops": ranks[0]["flops"],
        "versions": ranks[0]["versions"],
    }


def snapshots(folder: Path, ends: list[float]) -> dict:
    """Returns what a snapshot cost: the time of the window after which it was written and of the two that follow (some
    engines write in the background), less that of three windows just before a snapshot, when writing is over."""
    import statistics

    from cell import BLOCK

    windows = [
        0.0,
        0.0,
        *(end - begin for begin, end in zip(ends, ends[1:], strict=False)),
    ]  # [n]: seconds of window n; windows count from 1, and the start of the first is not known
    usual = statistics.median(windows[BLOCK - 1 :: BLOCK])
    size = sum(path.stat().st_size for name in KEPT for path in (folder / name).rglob("*") if path.is_file())
    return {
        "lost_s": [sum(windows[end : end + 3]) - 3 * usual for end in range(BLOCK, len(ends) - BLOCK + 1, BLOCK)],
        "snapshot_mb": size / 1e6,
    }


def last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


if __name__ == "__main__":
    main()
