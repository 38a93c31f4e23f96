"""Kills, stops and breaks a real job again and again; compares its result with an undisturbed run, bit for bit.

    python scripts/chaos.py --kills=20 --seed=1 [--workers=3] [--steps=1300] [--standby] [--keep=FOLDER]
    python scripts/chaos.py --train="--strategy=sockets"          or "--strategy=mesh --zero=3", or any other flags
    python scripts/chaos.py --job=fit                             a script with tfdist.fit and BackupAndRestore
    python scripts/chaos.py --bad_numbers                         a job with NaN in its data: rolls back once per epoch

Both runs train the same model, deterministically. `--kills` faults, drawn from the seed, hit the second run:

    kill_chief, kill_worker   SIGKILL to the chief, to another worker
    term_worker, term_all     SIGTERM to one worker, to the launcher (which is then started again)
    kill_launcher             SIGKILL to the launcher: the workers must end, too; then it is started again
    stop                      SIGSTOP to a worker
    kill_save, kill_restore   SIGKILL while writing a snapshot, while restoring; kill_backup: while writing fit's backup
    corrupt                   a bit of the newest snapshot is flipped, or a file truncated or removed; then SIGKILL
    disk_full                 two writes fail
    second_job                the same job is started on the same folder: it must be refused with exit code 2, and the
                              first job must continue

Compared at the end: every array of the last snapshot (weights, optimizer slots, moving averages, step), the evaluation,
and the samples of the global batch of every step; for fit, every array of model and optimizer, and the history. Exit
code 0 if all are equal. Prints the time from each kind of fault to the first new step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from chaos_jobs import ChaosJob, FitJob, TrainJob  # noqa: E402

from tests.e2e.job import ENVIRONMENT, records  # noqa: E402

STALLED_SECONDS = 180.0  # without a step; then something hangs
ORPHANED_SECONDS = 20.0  # within which workers must end after their launcher
UNNOTICED = ("disk_full", "second_job")  # after these, the same attempt continues


class Chaos:
    """One disturbed job."""

    def __init__(self, arguments: argparse.Namespace, job: ChaosJob, run_dir: Path):
        self.arguments, self.job, self.run_dir = arguments, job, run_dir
        self.random = random.Random(arguments.seed)
        self.done: list[str] = []
        self.recoveries: list[dict[str, float]] = []
        self.process: subprocess.Popen | None = None
        self.marks = run_dir / "faults"
        self.marks.mkdir(parents=True)
        (self.marks / "pace").write_text(f"{job.pace}")
        self.output = open(run_dir.parent / "chaos.log", "w")  # noqa: SIM115

    def plan(self) -> list[str]:
        """Returns the faults in random order; each kind occurs if there are enough faults."""
        count, kinds = self.arguments.kills, self.job.kinds
        chosen = [*kinds * (count // len(kinds)), *self.random.sample(kinds, count % len(kinds))]
        self.random.shuffle(chosen)
        return chosen

    def run(self) -> None:
        self.start()
        for number, kind in enumerate(self.plan(), 1):
            self.wait_for_progress()
            begun, step = time.time(), self.step()
            print(f"{number:3d}/{self.arguments.kills}  step {step:5d}  {kind}", file=sys.stderr, flush=True)
            getattr(self, kind)()
            self.done.append(kind)
            if kind not in UNNOTICED:
                self.note_recovery(kind, begun)
        (self.marks / "pace").unlink()  # the rest at full speed
        self.process.wait(timeout=1200)
        if self.process.returncode:
            raise SystemExit(f"the disturbed job ended with {self.process.returncode}: see {self.output.name}")

    def start(self) -> None:
        self.process = self.launched(self.output)

    def launched(self, output: TextIO) -> subprocess.Popen:
        a = self.arguments
        restarts = [f"--max_restarts={a.kills + 5}", "--grace=20", *(["--standby"] if a.standby else [])]
        return subprocess.Popen(
            command(self.job, a.workers, self.run_dir, restarts),
            cwd=self.run_dir,
            env={**ENVIRONMENT, "TFDIST_FAULTS": "armed"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    # -- faults ----------------------------------------------------------------------------------------------------

    def kill_chief(self) -> None:
        os.kill(self.workers()[0], signal.SIGKILL)

    def kill_worker(self) -> None:
        os.kill(self.random.choice(self.workers()[1:]), signal.SIGKILL)

    def term_worker(self) -> None:
        os.kill(self.random.choice(self.workers()), signal.SIGTERM)

    def term_all(self) -> None:
        self.process.terminate()
        if self.process.wait(timeout=120) != 42 and not self.said_disk_full():
            raise SystemExit(f"SIGTERM to the launcher ended with {self.process.returncode} instead of 42")
        self.start()

    def said_disk_full(self) -> bool:
        """Returns whether the job that has just ended was told to end while the disk was full. Then it cannot save, and
        must say so; a user frees space and starts it again.
        """
        sentence = "No space left on device (injected)): free or repair"
        return self.process.returncode == 9 and sentence in Path(self.output.name).read_text()[-3000:]

    def kill_launcher(self) -> None:
        orphans = self.workers()
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + ORPHANED_SECONDS
        while any(Path(f"/proc/{pid}").exists() for pid in orphans):
            if time.monotonic() > deadline:
                raise SystemExit(f"workers still run {ORPHANED_SECONDS:g} s after their launcher: {orphans}")
            time.sleep(0.1)
        self.start()

    def second_job(self) -> None:
        with tempfile.TemporaryFile("w+") as output:
            second = self.launched(output)
            try:
                second.wait(timeout=STALLED_SECONDS)
            except subprocess.TimeoutExpired:
                second.kill()
            output.seek(0)
            said = output.read()
        if second.returncode != 2 or "is in use by another job" not in said or "Traceback" in said:
            raise SystemExit(f"a second job on the same folder ended with {second.returncode}: {said}")
        before = self.step()
        self.wait(lambda: self.step() > before)

    def stop(self) -> None:
        os.kill(self.random.choice(self.workers()), signal.SIGSTOP)

    def arm(self, rank: int, kind: str) -> None:
        """Tells a worker to cause the fault itself, if this script could not do it at the right moment."""
        (self.marks / f"arm-{rank}-{kind}").touch()

    def kill_save(self) -> None:
        """Kills when the next snapshot's files are written, not yet committed. On a mesh every worker writes a part."""
        self.arm(
            self.random.randrange(self.arguments.workers) if "--strategy=mesh" in self.arguments.train else 0,
            "kill_save",
        )

    def kill_backup(self) -> None:
        """Kills the chief while the new backup is written, before the rename; if that is too fast, just after."""
        writing = self.run_dir / "backup" / "tfdist-backup.writing"
        chief, deadline = self.workers()[0], time.monotonic() + 10
        while not writing.exists() and time.monotonic() < deadline:
            pass
        os.kill(chief, signal.SIGKILL)

    def kill_restore(self) -> None:
        """Kills a worker, and another time when the restarted job restores."""
        self.arm(self.random.randrange(self.arguments.workers), "kill_restore")
        self.kill_worker()

    def corrupt(self) -> None:
        """Damages the newest snapshot behind the job's back, and kills a worker; the one before it must suffice."""
        self.wait(lambda: len(list((self.run_dir / "checkpoints").glob("step-*"))) > 1)
        newest = max((self.run_dir / "checkpoints").glob("step-*"))
        victims = sorted(path for path in newest.iterdir())
        victim = self.random.choice(victims)
        how = self.random.choice(("flip", "cut", "remove"))
        try:
            content = bytearray(victim.read_bytes())
            if how == "flip":
                content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
                victim.write_bytes(content)
            elif how == "cut":
                victim.write_bytes(content[: len(content) // 2])
            else:
                victim.unlink()
        except (FileNotFoundError, ValueError, IndexError):
            pass  # retention removed it first
        self.kill_worker()

    def disk_full(self) -> None:
        self.arm(0, "disk_full")

    # -- looking ---------------------------------------------------------------------------------------------------

    def workers(self) -> list[int]:
        """Returns the process ids of the running attempt in rank order."""
        listed = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True).stdout.split()
        ranks = {}
        for pid in map(int, listed):
            try:
                environ = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            except OSError:
                continue
            variables = dict(entry.partition("=")[::2] for entry in environ)
            if "TFDIST_STANDBY" not in variables and "TF_CONFIG" in variables:
                ranks[json.loads(variables["TF_CONFIG"])["task"]["index"]] = pid
        return [ranks[rank] for rank in sorted(ranks)]

    def step(self) -> int:
        log = self.run_dir / "logs" / "rank-0.jsonl"
        return max((record["step"] for record in records(self.run_dir, kind="train")), default=0) if log.exists() else 0

    def wait_for_progress(self) -> None:
        """Waits until this attempt has trained some steps, so that there is something to lose."""
        steps = self.random.randrange(*self.job.steps_between)
        self.wait(
            lambda: (
                [record for record in self.attempt() if record["kind"] == "train"][steps:]
                and len(self.workers()) == self.arguments.workers
            )
        )
        time.sleep(self.random.uniform(0.0, 0.3))

    def attempt(self) -> list[dict]:
        log = self.run_dir / "logs" / "rank-0.jsonl"
        if not log.exists():
            return []
        found = records(self.run_dir)
        return [record for record in found if record["attempt"] == found[-1]["attempt"]] if found else []

    def wait(self, condition) -> None:
        deadline = time.monotonic() + STALLED_SECONDS
        while not condition():
            if self.process.poll() is not None and self.said_disk_full():
                self.start()
            if self.process.poll() is not None:
                raise SystemExit(f"the job ended too early, with {self.process.returncode}: see {self.output.name}")
            if time.monotonic() > deadline:
                raise SystemExit(f"no progress for {STALLED_SECONDS:g} s: see {self.output.name}")
            time.sleep(0.1)

    def note_recovery(self, kind: str, begun: float) -> None:
        """Records the seconds from the fault to the first new step."""
        before = self.attempt()[-1]["attempt"]
        self.wait(
            lambda: (
                (found := self.attempt())
                and found[-1]["attempt"] > before
                and any(record["kind"] == "train" for record in found)
            )
        )
        self.recoveries.append({"kind": kind, "seconds": time.time() - begun})


def command(job: ChaosJob, workers: int, run_dir: Path, more: Sequence[str] = ()) -> list[str]:
    return [sys.executable, "-m", "tfdist.launch", f"--workers={workers}", *more, "--", *job.arguments(run_dir)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="(of fit: epochs) default: enough for all kills")
    parser.add_argument("--standby", action="store_true")
    parser.add_argument("--job", choices=("train", "fit"), default="train")
    parser.add_argument("--bad_numbers", action="store_true", help="with NaN in the data, and --on_nan=rollback")
    parser.add_argument("--train", default="", help="more flags of a job of tfdist.train")
    parser.add_argument(
        "--keep", default="", help="folder for both runs (default: a temporary one, removed at the end)"
    )
    arguments = parser.parse_args()
    job = FitJob(arguments) if arguments.job == "fit" else TrainJob(arguments)
    folder = Path(arguments.keep or tempfile.mkdtemp(prefix="tfdist-chaos-")).resolve()
    undisturbed, disturbed = folder / "undisturbed", folder / "disturbed"
    undisturbed.mkdir(parents=True, exist_ok=True)
    print("undisturbed run ...", file=sys.stderr, flush=True)
    begun = time.monotonic()
    with open(folder / "undisturbed.log", "w") as output:
        subprocess.run(
            command(job, arguments.workers, undisturbed),
            cwd=undisturbed,
            env=ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=True,
        )
    print(f"{time.monotonic() - begun:.0f} s; now with {arguments.kills} faults:", file=sys.stderr, flush=True)
    chaos = Chaos(arguments, job, disturbed)
    chaos.run()
    wrong = job.differences(undisturbed, disturbed)
    for kind in job.kinds:
        seconds = [recovery["seconds"] for recovery in chaos.recoveries if recovery["kind"] == kind]
        if kind in chaos.done:
            print(
                f"  {kind:13s} {chaos.done.count(kind):3d} times"
                + (
                    f", first new step after {statistics.median(seconds):5.1f} s (median; longest {max(seconds):.1f} s)"
                    if seconds
                    else ""
                )
            )
    print(
        f"{len(chaos.done)} faults, {len({record['attempt'] for record in records(disturbed)})} attempts: "
        + (
            f"{len(wrong)} differences: {', '.join(wrong[:10])}"
            if wrong
            else (
                f"weights, optimizer state, evaluations and all {job.steps} steps are bitwise those of the undisturbed"
                " run"
            )
        )
    )
    if not arguments.keep and not wrong:
        shutil.rmtree(folder)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
