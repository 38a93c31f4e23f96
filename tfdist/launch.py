"""python -m tfdist.launch: starts N workers of `tfdist.train` on this machine, and ends when they do.

  python -m tfdist.launch --workers=2 -- --flagfile=flags/digits_cnn.flags

Flags before `--` are the launcher's own, those after it go to every worker. Each worker's output is shown under its
name and written to RUN_DIR/logs/worker-K.log. The first worker to fail stops all; its cause is named, and its exit
code becomes the launcher's. With --max_restarts=N all are started again instead, and go on from the newest snapshot,
until N failures come without progress; mistakes in flags or data are never retried. SIGTERM (or Ctrl-C once) lets the workers save and end; a second ends them at once.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tfdist import flags
from tfdist.control import exit_codes
from tfdist.control.exit_codes import ConfigError
from tfdist.control.launcher import LocalJob
from tfdist.control.supervisor import RestartPolicy, Supervisor, newest_snapshot_step


def main(argv: list[str]) -> int:
    own, train = _split(argv)
    options = _parse(own)
    config = flags.parse(train, usage="Flags of the workers:").config
    if not config.run.dry_run:
        config.validate()
    show = None if options.show_ranks == "all" else {int(rank) for rank in options.show_ranks.split(",")}
    command = [sys.executable, "-m", "tfdist.train", *train]
    evaluator = [sys.executable, "-m", "tfdist.evaluate", "--follow", *train] if options.evaluator else None
    run_dir = Path(config.run.run_dir)

    def make_job() -> LocalJob:
        return LocalJob(command, options.workers, run_dir / "logs", evaluator=evaluator, show=show, pin=options.pin == "auto", grace=options.grace)

    return run(Supervisor(make_job, RestartPolicy(options.max_restarts), lambda: newest_snapshot_step(run_dir)), run_dir / "logs")


def run(supervisor: Supervisor, logs: Path) -> int:
    """Runs a supervised job to its end, with signals passed on. Returns its exit code."""
    requests = 0

    def on_signal(number: int, _) -> None:
        nonlocal requests
        requests += 1
        supervisor.stop()
        if supervisor.job:
            supervisor.job.kill() if requests > 1 else supervisor.job.request_stop(signal.SIGTERM)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGUSR1, lambda *_: supervisor.job and supervisor.job.request_stop(signal.SIGUSR1))
    try:
        result = supervisor.run()
    except OSError as error:
        raise ConfigError(f"The log folder {logs} cannot be written ({error.strerror}): choose another --run_dir.") from None
    if result.cause:
        print(f"tfdist: {result.cause}\ntfdist: logs are in {logs}", file=sys.stderr)
    return result.code


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    if "--" in argv:
        at = argv.index("--")
        return argv[:at], argv[at + 1:]
    return argv, []


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise ConfigError(f"{message}: the launcher's own flags stand before `--`, the workers' flags after it; `python -m tfdist.launch --help` lists the first, `python -m tfdist.train --help` the second.")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(allow_abbrev=False, prog="python -m tfdist.launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s --workers=N [flags] -- <flags of tfdist.train>")
    parser.add_argument("--workers", type=int, default=1, help="number of workers (default 1)")
    parser.add_argument("--evaluator", action="store_true", help="also start an evaluator that follows the checkpoints")
    parser.add_argument("--show_ranks", default="all", help="whose output is shown: all, or ranks such as 0,1 (logs are always complete)")
    parser.add_argument("--pin", choices=("auto", "none"), default="auto", help="auto: each worker gets an equal part of the cores (and GPUs) and as many threads")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds that a worker has to end after SIGTERM before it is killed")
    parser.add_argument("--max_restarts", type=int, default=0, help="failures without a new snapshot in between after which the launcher gives up (default 0: no restarts)")
    options = parser.parse_args(argv)
    if options.workers < 1:
        raise ConfigError(f"--workers={options.workers} is too small: it must be at least 1.")
    if options.max_restarts < 0:
        raise ConfigError(f"--max_restarts={options.max_restarts} is too small: it must be at least 0.")
    if options.show_ranks != "all" and not all(rank.isdigit() for rank in options.show_ranks.split(",")):
        raise ConfigError(f"--show_ranks={options.show_ranks} must be all, or ranks such as 0,1.")
    return options


if __name__ == "__main__":
    exit_codes.run_command(main, sys.argv[1:])
