"""python -m tfdist.launch: starts N workers of `tfdist.train`, on this machine or on a Ray cluster, and ends when they
do.

  python -m tfdist.launch --workers=2 -- --flagfile=flags/digits_cnn.flags
  python -m tfdist.launch --workers=2 -- script.py ARGS       a Keras script that calls tfdist.fit
  python -m tfdist.launch --on=ray --workers=4 --min_workers=2 -- --flagfile=flags/digits_cnn.flags

Flags before `--` are the launcher's own, those after it go to every worker. Each worker's output is shown under its
name and written to RUN_DIR/logs/worker-K.log. The first worker to fail stops all; its cause is named, and its exit
code becomes the launcher's (a worker killed by a signal counts as PEER_LOST). With --max_restarts=N all are started
again instead, and go on from the newest snapshot, until N failures come without progress; mistakes in flags or data are
never retried. With --min_workers=M a worker that cannot be brought back is left out, at the same global batch, and
tried again later; --discover names a command that tells how many workers there is room for. With --elastic
(--strategy=horovod) workers keep their processes when one is lost: they go on from copies in memory, and a new process
joins them. With --ps=M a chief and M parameter servers are started beside the workers, ranks in the order chief,
workers, servers; a worker that dies is then started again alone.
With --on=ray the workers run where Ray places them, each with --cpus_per_worker and --gpus_per_worker of its own. When
a node is lost they are placed anew; with --min_workers=M on what there is, and on more as soon as there is room.
SIGTERM (or Ctrl-C once) lets the workers save and end; a second ends them at once. SIGUSR1 lets them save
and go on.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from tfdist import flags
from tfdist.config import Config
from tfdist.control import exit_codes, lease
from tfdist.control.cluster import visible_gpus
from tfdist.control.elastic_job import ElasticJob
from tfdist.control.exit_codes import ConfigError, ExitCode
from tfdist.control.job import Job
from tfdist.control.launcher import LocalJob
from tfdist.control.processes import Standbys
from tfdist.control.ray_cluster import RayRoom, connect
from tfdist.control.ray_job import RayJob
from tfdist.control.strategies import STRATEGIES, asked_for
from tfdist.control.supervisor import RestartPolicy, Supervisor, newest_snapshot_step
from tfdist.control.worker_count import WorkerCount
from tfdist.data.batch_plan import plan_batch

STANDBY_AFTER_SECONDS = 15.0  # the job itself should have started by then


@dataclass(frozen=True)
class LaunchOptions:
    """The launcher's own flags."""

    on: str
    workers: int
    ps: int
    evaluator: bool
    show_ranks: set[int] | None  # None: all
    pin: bool
    cpus_per_worker: int
    gpus_per_worker: int
    placement_timeout: float  # seconds
    grace: float  # seconds
    max_restarts: int
    min_workers: int
    discover: str
    grow_after: float  # seconds
    standby: bool
    elastic: bool


def main(argv: list[str]) -> int:
    own, train = _split(argv)
    options = _parse(own)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # workers may print what this terminal cannot
    if train and train[0].endswith(".py"):
        return launch_script(train, options)
    config = flags.parse(train, usage="Flags of the workers:").config
    if not config.run.dry_run:
        config.validate()
    run_dir = Path(config.run.run_dir)
    if not config.run.dry_run:
        lease.refuse_if_held(run_dir)  # before anything is written to its logs
        os.environ[lease.JOB_VARIABLE] = uuid.uuid4().hex
    if options.on == "ray":
        return launch_on_ray(["-m", "tfdist.train", *train], run_dir / "logs", options, config)
    standbys = Standbys()
    if options.elastic and not asked_for(config.strategy.strategy).restarts_in_process:
        able = " or ".join(f"--strategy={name}" for name, each in STRATEGIES.items() if each.restarts_in_process)
        raise ConfigError(
            "--elastic needs workers that can leave one group and join another in the same process, which"
            f" --strategy={config.strategy.strategy} cannot: use {able}, or drop --elastic."
        )
    if options.elastic and config.run.deterministic:
        raise ConfigError(
            "--elastic with --deterministic promises too much, since the sums depend on how many workers there are at a"
            " step: drop one of them."
        )

    def make_job(workers: int) -> LocalJob:
        batch = (
            []
            if (workers == options.workers and not options.elastic) or config.run.dry_run
            else same_batch(config, options)
        )
        command, logs = [sys.executable, "-m", "tfdist.train", *train, *batch], run_dir / "logs"
        both = {
            "evaluator": [sys.executable, "-m", "tfdist.evaluate", "--follow", *train] if options.evaluator else None,
            "show": options.show_ranks,
            "pin": options.pin,
            "gpus_per_worker": options.gpus_per_worker,
            "grace": options.grace,
            "standbys": standbys,
        }
        if options.elastic:
            return ElasticJob(
                command,
                options.workers,
                logs,
                wanted=workers,
                least=options.min_workers or 1,
                losses=max(options.max_restarts, options.workers),
                **both,
            )
        return LocalJob(command, workers, logs, servers=options.ps, **both)

    workers = WorkerCount(options.workers, options.min_workers, options.discover, options.grow_after)
    try:
        return run(
            Supervisor(
                make_job,
                RestartPolicy(options.max_restarts),
                lambda: newest_snapshot_step(run_dir),
                workers,
                STANDBY_AFTER_SECONDS if options.standby else None,
            ),
            run_dir / "logs",
        )
    finally:
        standbys.close()


def launch_script(command: list[str], options: LaunchOptions) -> int:
    """A Keras script that calls tfdist.fit, on every worker; logs are in runs/NAME/logs. What it saves is its own
    affair, so there is no progress to be seen from here: --max_restarts counts all failures."""
    if options.ps or options.min_workers or options.evaluator or options.elastic:
        raise ConfigError(
            "--ps, --min_workers, --evaluator and --elastic are for flags of tfdist.train, not for a script: drop"
            f" them, or {command[0]}."
        )
    logs = Path("runs") / Path(command[0]).stem / "logs"
    if options.on == "ray":
        return launch_on_ray(["-m", "tfdist.script", *command], logs, options)

    def make_job(workers: int) -> LocalJob:
        return LocalJob(
            [sys.executable, "-m", "tfdist.script", *command],
            workers,
            logs,
            show=options.show_ranks,
            pin=options.pin,
            gpus_per_worker=options.gpus_per_worker,
            grace=options.grace,
        )

    return run(
        Supervisor(make_job, RestartPolicy(options.max_restarts), lambda: -1, WorkerCount(options.workers, 0)), logs
    )


def launch_on_ray(arguments: list[str], logs: Path, options: LaunchOptions, config: Config | None = None) -> int:
    """`python ARGUMENTS` on every worker, where Ray has room.

    `config`: of a run of tfdist.train, whose snapshots show progress.
    """
    connect()
    room = RayRoom(
        options.workers,
        options.min_workers,
        options.cpus_per_worker or 1,
        options.gpus_per_worker,
        options.placement_timeout,
    )

    def make_job(workers: int) -> Job:
        batch = (
            [] if workers == options.workers or config is None or config.run.dry_run else same_batch(config, options)
        )
        return RayJob(
            [*arguments, *batch],
            room.places,
            logs,
            cpus=options.cpus_per_worker or 1,
            gpus=options.gpus_per_worker,
            pin=options.pin,
            timeout=options.placement_timeout,
            show=options.show_ranks,
            grace=options.grace,
        )

    try:
        return run(
            Supervisor(
                make_job,
                RestartPolicy(options.max_restarts),
                lambda: newest_snapshot_step(logs.parent) if config else -1,
                room,
            ),
            logs,
        )
    finally:
        room.close()


def same_batch(config: Config, options: LaunchOptions) -> list[str]:
    """Flags that keep the global batch, and the memory that a worker needs, of the full number of workers: with fewer,
    the accumulation rises."""
    gpus = options.gpus_per_worker or (len(visible_gpus(os.environ)) // options.workers if options.on == "local" else 0)
    plan = plan_batch(config.batch, options.workers * (config.strategy.virtual_devices or max(gpus, 1)))
    return [f"--global_batch={plan.global_batch}", f"--micro_batch={plan.micro_batch}", "--accumulation=0"]


def run(supervisor: Supervisor, logs: Path) -> int:
    """Runs a supervised job to its end, with signals passed on. Returns its exit code."""
    requests = 0

    def on_signal(number: int, _) -> None:
        nonlocal requests
        requests += 1
        supervisor.stop()
        if requests == 1:
            # Not print(): a handler may interrupt another print and deadlock on its lock.
            os.write(
                2,
                f"tfdist: {signal.Signals(number).name}: the workers save and end; a second signal ends them at once.\n".encode(),
            )
        if supervisor.job:
            supervisor.job.request_stop() if requests == 1 else supervisor.job.kill()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, on_signal)
    signal.signal(signal.SIGUSR1, lambda *_: supervisor.job and supervisor.job.forward(signal.SIGUSR1))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it was ignored, exit codes would be lost
    result = supervisor.run()
    if result.last_lines:
        print("tfdist: the last lines of the worker that failed:", *result.last_lines, sep="\n  ", file=sys.stderr)
    if result.cause:
        hint = "tfdist: a SIGKILL that nobody sent means that memory ran out\n" if "(SIGKILL)" in result.cause else ""
        print(f"tfdist: {result.cause}\n{hint}tfdist: logs are in {logs}", file=sys.stderr)
    if requests > 1:
        print("tfdist: ended at once by a second signal.", file=sys.stderr)
        return ExitCode.INTERRUPTED
    return result.code


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    if "--" in argv:
        at = argv.index("--")
        return argv[:at], argv[at + 1 :]
    return argv, []


_NOT_ON_RAY = {
    "ps": "drop it, or start the launcher without --on",
    "elastic": "drop it, a lost worker is placed anew and all go on from the newest snapshot",
    "evaluator": "start `python -m tfdist.evaluate --follow` beside it",
    "standby": "drop it",
    "discover": "Ray tells how many workers there is room for, drop it",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ConfigError(
            f"{message}: the launcher's own flags stand before `--`, the workers' flags after it; `python -m"
            " tfdist.launch --help` lists the first, `python -m tfdist.train --help` the second."
        )


def _parse(argv: list[str]) -> LaunchOptions:
    parser = _Parser(
        allow_abbrev=False,
        prog="python -m tfdist.launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s --workers=N [flags] -- <flags of tfdist.train>",
    )
    parser.add_argument(
        "--on",
        choices=("local", "ray"),
        default="local",
        help="where: on this machine (default), or on the Ray cluster that it, or RAY_ADDRESS, belongs to",
    )
    parser.add_argument("--workers", type=int, default=1, help="number of workers (default 1)")
    parser.add_argument(
        "--ps",
        type=int,
        default=0,
        help=(
            "number of parameter servers, for --strategy=parameter_server; with any, a chief is started as well"
            " (default 0)"
        ),
    )
    parser.add_argument(
        "--evaluator",
        action="store_true",
        help="also start an evaluator that follows the checkpoints; if it fails, training goes on",
    )
    parser.add_argument(
        "--show_ranks",
        default="all",
        help="whose output is shown: all, or ranks such as 0,1 (logs are always complete)",
    )
    parser.add_argument(
        "--pin",
        choices=("auto", "none"),
        default="auto",
        help=(
            "auto: each worker gets an equal part of the cores, and as many threads unless OMP_NUM_THREADS and the like"
            " are set"
        ),
    )
    parser.add_argument(
        "--gpus_per_worker",
        type=int,
        default=0,
        help="GPUs of each worker (default 0: an equal part of those visible; with --on=ray none)",
    )
    parser.add_argument(
        "--cpus_per_worker",
        type=int,
        default=0,
        help="with --on=ray: CPUs that Ray sets aside for each worker, and its threads (default 1)",
    )
    parser.add_argument(
        "--placement_timeout",
        type=float,
        default=300.0,
        help="with --on=ray: seconds to wait for room on the cluster (default 300)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        help="seconds that a worker has to end after SIGTERM before it is killed (default 30)",
    )
    parser.add_argument(
        "--max_restarts",
        type=int,
        default=None,
        help=(
            "failures without a new snapshot in between after which the launcher gives up (default 0: no restarts; with"
            " --on=ray 3)"
        ),
    )
    parser.add_argument(
        "--min_workers",
        type=int,
        default=0,
        help="go on with as few as this when a worker cannot be brought back (default 0: always with all)",
    )
    parser.add_argument(
        "--discover",
        default="",
        help=(
            "shell command that prints how many workers there is room for; asked every 5 s (default: a worker that"
            " fails twice in a row counts as gone)"
        ),
    )
    parser.add_argument(
        "--grow_after",
        type=float,
        default=300.0,
        help="seconds after which a worker that was left out is tried again (default 300)",
    )
    parser.add_argument(
        "--standby",
        action="store_true",
        help=(
            "keep a spare process per worker that has done its imports, for a faster restart; needs the memory of an"
            " idle process each"
        ),
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help=(
            "with --strategy=horovod: when a worker is lost the others go on in their processes, from copies of the"
            " state in memory, while at least --min_workers (default 1) are left; a new process takes its place when it"
            " is ready"
        ),
    )
    options = parser.parse_args(argv)
    if options.max_restarts is None:
        options.max_restarts = 3 if options.on == "ray" else 0
    for name, least in (
        ("workers", 1),
        ("ps", 0),
        ("gpus_per_worker", 0),
        ("cpus_per_worker", 0),
        ("placement_timeout", 0),
        ("grace", 0),
        ("max_restarts", 0),
        ("min_workers", 0),
        ("grow_after", 0),
    ):
        if not getattr(options, name) >= least:
            raise ConfigError(f"--{name}={getattr(options, name)} is too small: it must be at least {least}.")
    if options.min_workers > options.workers:
        raise ConfigError(f"--min_workers={options.min_workers} is more than --workers={options.workers}: lower it.")
    if options.discover and not options.min_workers:
        raise ConfigError(
            f"--discover={options.discover!r} may ask for fewer workers, but --min_workers is not given: say how few"
            " may go on, for example --min_workers=1."
        )
    for name in ("min_workers", "standby", "elastic") if options.ps else ():
        if getattr(options, name):
            raise ConfigError(
                f"--{name} is not available with --ps={options.ps}: a worker that dies is started again alone, and"
                " needs no restart of the job."
            )
    for name, instead in _NOT_ON_RAY.items() if options.on == "ray" else ():
        if getattr(options, name):
            raise ConfigError(f"--{name} is not available with --on=ray: {instead}.")
    if options.on == "local" and options.cpus_per_worker:
        raise ConfigError(
            f"--cpus_per_worker={options.cpus_per_worker} is for --on=ray: drop it; on this machine each worker gets an"
            " equal part of the cores."
        )
    show = _ranks(options.show_ranks, options.workers + (1 + options.ps if options.ps else 0))
    return LaunchOptions(**{**vars(options), "pin": options.pin == "auto", "show_ranks": show})


def _ranks(text: str, workers: int) -> set[int] | None:
    if text == "all":
        return None
    if not all(rank.isdecimal() and int(rank) < workers for rank in text.split(",")):
        raise ConfigError(f"--show_ranks={text} must be all, or ranks from 0 to {workers - 1} such as 0,1.")
    return {int(rank) for rank in text.split(",")}


if __name__ == "__main__":
    exit_codes.run_command(main, sys.argv[1:])
