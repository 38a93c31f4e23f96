"""Kills, stops and breaks a real job again and again, then compares its end with that of an undisturbed one, bit for
bit.

    python scripts/chaos.py --kills=20 --seed=1 [--workers=3] [--steps=1300] [--standby] [--keep=FOLDER]
    [--train="--strategy=mesh --zero=3"]

Both runs train the same model with `--deterministic`. While the second one runs, `--kills` faults befall it, drawn from
the seed:

    kill_chief, kill_worker   SIGKILL
    term_worker, term_all     SIGTERM to one worker, or to the launcher (then started again)
    stop                      SIGSTOP
    kill_save, kill_restore   killed while writing a snapshot, while restoring
    corrupt                   a bit of the newest snapshot flipped, or a file cut or removed, and a SIGKILL
    disk_full                 two writes fail

Compared at the end: every array of the last snapshot (weights, optimizer slots, moving averages, step), the evaluation,
and for every step the samples of its global batch. Ends with 0 if all are equal, and prints where time went after each
kill.
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
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.e2e.job import CLUSTERS, ENVIRONMENT, records, snapshot  # noqa: E402

KINDS = (
    "kill_chief",
    "kill_worker",
    "term_worker",
    "term_all",
    "stop",
    "kill_save",
    "kill_restore",
    "corrupt",
    "disk_full",
)
SAVE_EVERY = 20
STEP_SECONDS = 0.05  # the model is tiny: faults need time to come
STALLED_SECONDS = 180.0  # without a step: something hangs


class Chaos:
    """One disturbed job."""

    def __init__(self, arguments: argparse.Namespace, run_dir: Path):
        self.arguments, self.run_dir = arguments, run_dir
        self.random = random.Random(arguments.seed)
        self.done: list[str] = []
        self.recoveries: list[dict[str, float]] = []
        self.process: subprocess.Popen | None = None
        self.marks = run_dir / "faults"
        self.marks.mkdir(parents=True)
        (self.marks / "pace").write_text(f"{STEP_SECONDS}")
        self.output = open(run_dir.parent / "chaos.log", "w")  # noqa: SIM115

    def plan(self) -> list[str]:
        """The faults in random order; each kind occurs if there are enough of them."""
        count = self.arguments.kills
        chosen = [*KINDS * (count // len(KINDS)), *self.random.sample(KINDS, count % len(KINDS))]
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
            if kind != "disk_full":
                self.note_recovery(kind, begun)
        (self.marks / "pace").unlink()  # the rest at full speed
        self.process.wait(timeout=1200)
        if self.process.returncode:
            raise SystemExit(f"the disturbed job ended with {self.process.returncode}: see {self.output.name}")

    def start(self) -> None:
        a = self.arguments
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tfdist.launch",
                f"--workers={a.workers}",
                f"--max_restarts={a.kills + 5}",
                "--grace=20",
                *(["--standby"] if a.standby else []),
                "--",
                *flags(a),
                f"--run_dir={self.run_dir}",
            ],
            env={**ENVIRONMENT, "TFDIST_FAULTS": "armed"},
            stdout=self.output,
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
        if self.process.wait(timeout=120) != 42:
            raise SystemExit(f"SIGTERM to the launcher ended with {self.process.returncode} instead of 42")
        self.start()

    def stop(self) -> None:
        os.kill(self.random.choice(self.workers()), signal.SIGSTOP)

    def arm(self, rank: int, kind: str) -> None:
        """What cannot be done from outside at the right moment is done by the worker itself."""
        (self.marks / f"arm-{rank}-{kind}").touch()

    def kill_save(self) -> None:
        """When the next snapshot's files are written, but not yet committed. On a mesh every worker writes a part."""
        self.arm(
            self.random.randrange(self.arguments.workers) if "--strategy=mesh" in self.arguments.train else 0,
            "kill_save",
        )

    def kill_restore(self) -> None:
        """A kill, and another one when the restarted job restores."""
        self.arm(self.random.randrange(self.arguments.workers), "kill_restore")
        self.kill_worker()

    def corrupt(self) -> None:
        """The newest snapshot is damaged behind the job's back; the one before it must do."""
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
            pass  # retention was faster
        self.kill_worker()

    def disk_full(self) -> None:
        self.arm(0, "disk_full")

    # -- looking ---------------------------------------------------------------------------------------------------

    def workers(self) -> list[int]:
        """The processes of the running attempt in rank order."""
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
        """Until this attempt has trained some steps, so that there is something to lose."""
        steps = self.random.randrange(5, 2 * SAVE_EVERY)
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
            if self.process.poll() is not None:
                raise SystemExit(f"the job ended too early, with {self.process.returncode}: see {self.output.name}")
            if time.monotonic() > deadline:
                raise SystemExit(f"no progress for {STALLED_SECONDS:g} s: see {self.output.name}")
            time.sleep(0.1)

    def note_recovery(self, kind: str, begun: float) -> None:
        """Seconds from the fault to the first new step."""
        before = self.attempt()[-1]["attempt"]
        self.wait(
            lambda: (
                (found := self.attempt())
                and found[-1]["attempt"] > before
                and any(record["kind"] == "train" for record in found)
            )
        )
        self.recoveries.append({"kind": kind, "seconds": time.time() - begun})


def flags(arguments: argparse.Namespace) -> list[str]:
    return [
        *CLUSTERS,
        "--source=tests.e2e.sources:identified",
        "--objective=tests.e2e.sources:identifying",
        "--model_args=widths=(16,),dropout=0.1,num_outputs=2",
        f"--steps={arguments.steps}",
        "--deterministic",
        "--optimizer=adamw",
        "--ema=0.9",
        "--schedule=cosine",
        "--accumulation=2",
        "--log_every=1",
        f"--save_every={SAVE_EVERY}",
        "--progress=none",
        "--trackers=none",
        "--heartbeat_timeout=3",
        "--eval_every=500",
        *arguments.train.split(),
    ]


def batches(run_dir: Path) -> dict[int, tuple]:
    """Step -> checksums of its samples and its loss; steps that were done again must have had the same."""
    seen: dict[int, tuple] = {}
    for record in records(run_dir, kind="train"):
        values = tuple(
            record["values"][name]
            for name in ("train/first_checksum", "train/second_checksum", "data/consumed_samples", "train/loss")
        )
        if seen.setdefault(record["step"], values) != values:
            raise SystemExit(
                f"step {record['step']} was done again with other samples or another loss: {seen[record['step']]}, then"
                f" {values}"
            )
    return seen


def compare(undisturbed: Path, disturbed: Path, steps: int) -> list[str]:
    """What differs; [] is what should come."""
    wrong = []
    one, other = snapshot(undisturbed, steps), snapshot(disturbed, steps)
    wrong += [
        f"array {key}"
        for key in sorted({*one, *other})
        if key not in one or key not in other or one[key].tobytes() != other[key].tobytes()
    ]
    evaluations = [
        {record["step"]: record["values"] for record in records(folder, kind="eval")}
        for folder in (undisturbed, disturbed)
    ]
    wrong += [
        f"evaluation at step {step}" for step in evaluations[0] if evaluations[0][step] != evaluations[1].get(step)
    ]
    seen = [batches(folder) for folder in (undisturbed, disturbed)]
    wrong += [
        f"global batch of step {step}"
        for step in range(1, steps + 1)
        if seen[0].get(step) != seen[1].get(step) or step not in seen[0]
    ]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="default: enough for all kills")
    parser.add_argument("--standby", action="store_true")
    parser.add_argument("--train", default="", help="more flags of the job")
    parser.add_argument(
        "--keep", default="", help="folder for both runs (default: a temporary one, removed at the end)"
    )
    arguments = parser.parse_args()
    folder = Path(arguments.keep or tempfile.mkdtemp(prefix="tfdist-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    arguments.steps = arguments.steps or 100 + 60 * arguments.kills
    print("undisturbed run ...", file=sys.stderr, flush=True)
    begun = time.monotonic()
    with open(folder / "undisturbed.log", "w") as output:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "tfdist.launch",
                f"--workers={arguments.workers}",
                "--",
                *flags(arguments),
                f"--run_dir={folder / 'undisturbed'}",
            ],
            env=ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=True,
        )
    print(f"{time.monotonic() - begun:.0f} s; now with {arguments.kills} faults:", file=sys.stderr, flush=True)
    chaos = Chaos(arguments, folder / "disturbed")
    chaos.run()
    wrong = compare(folder / "undisturbed", folder / "disturbed", arguments.steps)
    for kind in KINDS:
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
        f"{len(chaos.done)} faults, {len({record['attempt'] for record in records(folder / 'disturbed')})} attempts: "
        + (
            f"{len(wrong)} differences: {', '.join(wrong[:10])}"
            if wrong
            else (
                f"weights, optimizer state, evaluations and all {arguments.steps} global batches are bitwise those of"
                " the undisturbed run"
            )
        )
    )
    if not arguments.keep and not wrong:
        shutil.rmtree(folder)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
