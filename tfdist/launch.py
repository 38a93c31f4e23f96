"""python -m tfdist.launch: starts N workers of `tfdist.train`, on this machine or on a Ray cluster, and ends when they
end.

  python -m tfdist.launch --workers=2 -- --flagfile=flags/digits_cnn.flags
  python -m tfdist.launch --workers=2 -- script.py ARGS       a Keras script that calls tfdist.fit
  python -m tfdist.launch --workers=2 -- -m MODULE ARGS       a module, such as tfdist.doctor
  python -m tfdist.launch --on=ray --workers=4 --min_workers=2 -- --flagfile=flags/digits_cnn.flags

Flags before `--` are the launcher's own; those after it go to every worker. Each worker's output is shown under its
name and written to RUN_DIR/logs/worker-K.log. The first worker that fails stops all; its cause is named, and its exit
code becomes the launcher's (a worker killed by a signal counts as PEER_LOST). With --max_restarts=N all workers are
restarted instead and resume from the newest snapshot, until N failures come without progress; mistakes in flags or data
are never retried. With --min_workers=M a worker that cannot be restarted is left out, at the same global batch, and
tried again later; --discover names a command that tells how many workers can run at present. With --elastic
(--strategy=horovod) workers keep their processes when one is lost: they resume from copies in memory, and a new process
joins them. With --ps=M a chief and M parameter servers are started in addition to the workers, ranks in the order
chief, workers, servers; a worker that dies is then restarted alone. With --on=ray the workers run where Ray places
them, each with its own --cpus_per_worker and --gpus_per_worker. When a node is lost they are placed again; with
--min_workers=M on the remaining resources, and on more as soon as these are available. SIGTERM (or Ctrl-C once) lets
the workers save and end; a second one ends them at once. SIGUSR1 lets them save and continue, SIGUSR2 lets those of
--profile_ranks (by default rank 0) trace the next call of the step.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import uuid
from functools import partial
from pathlib import Path
from typing import Any

from tfdist import flags
from tfdist.config import COMPONENTS, Config
from tfdist.config.strategies import STRATEGIES, strategy_or_undecided
from tfdist.control import backup_count, exit_codes, lease
from tfdist.control.command_parser import check_module, module_named_in, program_command, split_at_dashes
from tfdist.control.exit_codes import ConfigError, ExitCode
from tfdist.control.machine_shares import visible_gpus
from tfdist.control.processes import Standbys
from tfdist.control.run_address import backup_folder
from tfdist.control.signals import StopSignals, on_hangup
from tfdist.control.terminal import say, say_at_once
from tfdist.data.batch_plan import plan_batch
from tfdist.launcher.elastic_job import ElasticJob
from tfdist.launcher.job import Job
from tfdist.launcher.launch_options import LaunchOptions, launch_parser, parse_launch_options
from tfdist.launcher.local_job import LocalJob
from tfdist.launcher.ray_cluster import RayPlacements, connect
from tfdist.launcher.ray_job import RayJob
from tfdist.launcher.supervisor import RestartPolicy, Supervisor, newest_saved_step
from tfdist.launcher.worker_count import WorkerCount
from tfdist.runtime import mesh
from tfdist.runtime.factory import replicas_of

STANDBY_AFTER_SECONDS = 15.0  # the job itself should have started by then


def main(argv: list[str]) -> int:
    own_argv, train = split_at_dashes(argv)
    options = parse_launch_options(own_argv, __doc__ or "", workers_help(own_argv))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # workers may print what this terminal cannot
    if train and train[0].endswith(".py"):
        return launch_program(program_command(train), Path(train[0]).stem, options)
    if module := module_named_in(train):
        check_module(module)
        return launch_program(program_command(train), module, options)
    config = flags.parse(train, usage="Flags of the workers:", before=launch_parser("")).config
    run_dir = config.run.folder
    if not config.run.dry_run:
        config.validate()
        lease.refuse_if_held(run_dir)  # before anything is written to its logs
        os.environ[lease.JOB_VARIABLE] = uuid.uuid4().hex
    if options.on == "ray":
        return launch_on_ray(["-m", "tfdist.train", *train], run_dir / "logs", options, config)
    return launch_here(train, options, config)


def workers_help(own_argv: list[str]) -> str:
    """The text that --help and --helpfull show below the launcher's own flags."""
    asked = flags.asked_help(own_argv)
    usage = "flags of the workers, after `--`:"
    return asked and flags.help_text(usage, COMPONENTS, full=asked == "full")


def launch_here(train: list[str], options: LaunchOptions, config: Config) -> int:
    """Runs tfdist.train with the flags `train` on every worker, on this machine."""
    if options.elastic:
        check_elastic(config)
    run_dir, standbys, fits = config.run.folder, Standbys(), partial(mesh.fits, config.parallel.mesh)
    counts = WorkerCount(options.workers, options.min_workers, options.discover, options.grow_after, fits)

    def make_job(workers: int) -> LocalJob:
        as_flags_say = workers == options.workers and not options.elastic
        batch = [] if as_flags_say or config.run.dry_run else same_batch(config, options)
        command, logs = [sys.executable, "-m", "tfdist.train", *train, *batch], run_dir / "logs"
        alike = {
            "evaluator": command if options.evaluator else None,  # its TF_CONFIG makes it one
            "standbys": standbys,
            **job_options(options),
        }
        if not options.elastic:
            return LocalJob(command, workers, logs, servers=options.ps, left_out=counts.left_out, **alike)
        return ElasticJob(
            command,
            options.workers,
            logs,
            wanted=workers,
            least=options.min_workers or 1,
            losses=max(options.max_restarts, options.workers),
            grow_after=options.grow_after,
            **alike,
        )

    supervisor = Supervisor(
        make_job,
        RestartPolicy(options.max_restarts),
        lambda: newest_step(config),
        counts,
        STANDBY_AFTER_SECONDS if options.standby else None,
    )
    try:
        return run(supervisor, run_dir / "logs")
    finally:
        standbys.close()


def job_options(options: LaunchOptions) -> dict[str, Any]:
    """The options shared by jobs of every kind (JobOptions)."""
    return {
        "show": options.show_ranks,
        "pin": options.pin,
        "gpus_per_worker": options.gpus_per_worker,
        "grace": options.grace,
    }


def check_elastic(config: Config) -> None:
    """Raises ConfigError if workers with this configuration cannot survive the loss of one of them."""
    if not strategy_or_undecided(config.strategy.strategy).restarts_in_process:
        able = " or ".join(f"--strategy={name}" for name, each in STRATEGIES.items() if each.restarts_in_process)
        raise ConfigError(
            "--elastic needs workers that can leave one group and join another in the same process, which"
            f" --strategy={config.strategy.strategy} cannot: use {able}, or drop --elastic."
        )
    if config.run.deterministic:
        raise ConfigError(
            "--deterministic cannot be guaranteed with --elastic, since the sums depend on the number of workers at a"
            " step: drop one of them."
        )


def launch_program(command: list[str], name: str, options: LaunchOptions) -> int:
    """Runs a module with its arguments on every worker, such as tfdist.script with a Keras script that calls
    tfdist.fit.

    Logs are in runs/NAME/logs. Where the program saves is unknown here, so its number of backups counts as progress;
    there is none with Ray, whose workers may be on other machines."""
    if options.ps or options.min_workers or options.evaluator or options.elastic:
        raise ConfigError(
            "--ps, --min_workers, --evaluator and --elastic are for flags of tfdist.train, not for a script or a"
            f" module: drop them, or {name}."
        )
    logs = Path("runs") / name / "logs"
    os.environ[lease.JOB_VARIABLE] = uuid.uuid4().hex
    if options.on == "ray":
        return launch_on_ray(["-m", *command], logs, options)

    backups = logs / ".backup-count"  # a name that no script gives to anything
    backup_count.begin(backups)
    os.environ[backup_count.VARIABLE] = str(backups.absolute())

    def make_job(workers: int) -> LocalJob:
        return LocalJob([sys.executable, "-m", *command], workers, logs, **job_options(options))

    return run(
        Supervisor(
            make_job,
            RestartPolicy(options.max_restarts),
            lambda: backup_count.read(backups),
            WorkerCount(options.workers, 0),
            counted="backup",
        ),
        logs,
    )


def newest_step(config: Config) -> int:
    """The newest saved step, by which the supervisor sees that a job makes progress."""
    return newest_saved_step(config.run.folder, backup_folder(config.checkpoint.backup_dir, config.run.cache_dir))


def launch_on_ray(arguments: list[str], logs: Path, options: LaunchOptions, config: Config | None = None) -> int:
    """Runs `python ARGUMENTS` on every worker, where Ray has free resources.

    config: that of a run of tfdist.train, whose snapshots show progress.
    """
    connect()
    placements = RayPlacements(
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
            placements.places,
            logs,
            cpus=options.cpus_per_worker or 1,
            timeout=options.placement_timeout,
            **job_options(options),
        )

    try:
        return run(
            Supervisor(
                make_job,
                RestartPolicy(options.max_restarts),
                lambda: newest_step(config) if config else -1,
                placements,
            ),
            logs,
        )
    finally:
        placements.close()


def same_batch(config: Config, options: LaunchOptions) -> list[str]:
    """Flags that keep the global batch, and the memory per worker, of the full number of workers: with fewer workers,
    the accumulation rises."""
    gpus = options.gpus_per_worker or (len(visible_gpus(os.environ)) // options.workers if options.on == "local" else 0)
    local = config.strategy.virtual_devices or max(gpus, 1)
    plan = plan_batch(config.batch, replicas_of(config, options.workers, local))
    return [f"--global_batch={plan.global_batch}", f"--micro_batch={plan.micro_batch}", "--accumulation=0"]


def run(supervisor: Supervisor, logs: Path) -> int:
    """Runs a supervised job to its end and forwards signals to it. Returns its exit code."""
    signals, asked, second = StopSignals(), False, 0

    def on_signal(number: int, _) -> None:
        nonlocal asked, second
        if signals.is_second(number):
            second = number
            if supervisor.job:
                supervisor.job.kill()
        elif not asked:
            asked = True
            supervisor.stop()
            name = signal.Signals(number).name
            say_at_once(f"tfdist: {name}: the workers save and end; a second signal ends them at once.")
            if supervisor.job:
                supervisor.job.request_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    on_hangup(on_signal)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: supervisor.job and supervisor.job.forward(number))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it was ignored, exit codes would be lost
    result = supervisor.run()
    if result.last_lines:
        print("tfdist: the last lines of the worker that failed:", *result.last_lines, sep="\n  ", file=sys.stderr)
    if result.cause:
        say(result.cause)
        if "(SIGKILL)" in result.cause:
            say("a SIGKILL that nobody sent means that memory ran out")
        say(f"logs are in {logs}")
    if second:
        say("ended at once by a second signal.")
    return ExitCode.INTERRUPTED if second == signal.SIGINT else result.code


if __name__ == "__main__":
    exit_codes.run_command(main, sys.argv[1:])
