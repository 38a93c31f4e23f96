"""The launcher's own flags, read and checked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from tfdist.control.command_parser import CommandParser, check_least, check_most
from tfdist.control.exit_codes import ConfigError
from tfdist.control.ranks import parse_ranks
from tfdist.control.time_limit import MOST_SECONDS


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


def parse_launch_options(argv: list[str], description: str, epilog: str) -> LaunchOptions:
    """Parses and checks the flags before `--`. Raises ConfigError. --help prints `description`, the flags and `epilog`,
    and ends the process."""
    options = launch_parser(description, epilog).parse_args(argv)
    if options.max_restarts is None:
        options.max_restarts = 3 if options.on == "ray" else 0
    _check_amounts(options)
    _check_combinations(options)
    processes = options.workers + (1 + options.ps if options.ps else 0)
    show = parse_ranks("show_ranks", options.show_ranks, processes)
    return LaunchOptions(**{**vars(options), "pin": options.pin == "auto", "show_ranks": show})


def launch_parser(description: str, epilog: str = "") -> CommandParser:
    """Makes the parser of the flags before `--`."""
    parser = CommandParser(
        hint=(
            "the launcher's own flags go before `--`, the workers' flags after it; `python -m tfdist.launch --help`"
            " lists the first, `python -m tfdist.train --help` the second"
        ),
        prog="python -m tfdist.launch",
        description=description,
        epilog=epilog,
        usage="%(prog)s --workers=N [flags] -- <flags of tfdist.train>",
    )
    _add_workers(parser)
    _add_restarts(parser)
    parser.add_argument("--helpfull", action="help", help="show this help, and all flags of the workers")
    return parser


def _add_workers(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what is started, where, and with which resources."""
    parser.add_argument(
        "--on",
        choices=("local", "ray"),
        default="local",
        help="where to run: this machine (default), or the Ray cluster that this machine or RAY_ADDRESS belongs to",
    )
    parser.add_argument("--workers", type=int, default=1, help="number of workers (default 1)")
    parser.add_argument(
        "--ps",
        type=int,
        default=0,
        help=(
            "number of parameter servers, for --strategy=parameter_server; if any, a chief is started as well (default"
            " 0)"
        ),
    )
    parser.add_argument(
        "--evaluator",
        action="store_true",
        help="also start an evaluator that follows the checkpoints; if it fails, training continues",
    )
    parser.add_argument(
        "--show_ranks",
        default="all",
        help="workers whose output is shown: all, or ranks such as 0,1 (logs are always complete)",
    )
    parser.add_argument(
        "--pin",
        choices=("auto", "none"),
        default="auto",
        help=(
            "auto: each worker gets an equal share of the cores, and as many threads unless OMP_NUM_THREADS or similar"
            " is set"
        ),
    )
    parser.add_argument(
        "--gpus_per_worker",
        type=int,
        default=0,
        help="GPUs of each worker (default 0: an equal share of those visible; with --on=ray none)",
    )
    parser.add_argument(
        "--cpus_per_worker",
        type=int,
        default=0,
        help="with --on=ray: CPUs that Ray reserves for each worker, and its threads (default 1)",
    )
    parser.add_argument(
        "--placement_timeout",
        type=float,
        default=300.0,
        help="with --on=ray: seconds to wait for room on the cluster (default 300)",
    )


def _add_restarts(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what happens when a worker fails or is asked to end."""
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        help=(
            "seconds that a worker has to exit after SIGTERM before it is killed, and with --elastic to leave a broken"
            " group (default 30)"
        ),
    )
    parser.add_argument(
        "--max_restarts",
        type=int,
        default=None,
        help=(
            "failures in a row, without a new snapshot, after which the launcher gives up (default 0: no restarts; with"
            " --on=ray 3)"
        ),
    )
    parser.add_argument(
        "--min_workers",
        type=int,
        default=0,
        help="continue with as few workers as this when one cannot be restarted (default 0: always with all)",
    )
    parser.add_argument(
        "--discover",
        default="",
        help=(
            "shell command that prints how many workers there is room for; run every 5 s (default: a worker that fails"
            " twice in a row counts as lost)"
        ),
    )
    parser.add_argument(
        "--grow_after",
        type=float,
        default=300.0,
        help="seconds after which a worker that was left out is retried (default 300)",
    )
    parser.add_argument(
        "--standby",
        action="store_true",
        help=(
            "keep a spare process per worker with its imports done, for a faster restart; each needs the memory of an"
            " idle process"
        ),
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help=(
            "with --strategy=horovod: when a worker is lost, the others continue in their processes, from copies of the"
            " state in memory, while at least --min_workers (default 1) are left; a new process takes its place when it"
            " is ready"
        ),
    )


_NOT_ON_RAY = {
    "ps": "drop it, or start the launcher without --on",
    "elastic": "drop it; a lost worker is placed again, and all resume from the newest snapshot",
    "evaluator": "start `python -m tfdist.evaluate --follow` beside it",
    "standby": "drop it",
    "discover": "drop it; Ray reports how many workers there is room for",
}


def _check_amounts(options: argparse.Namespace) -> None:
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
        check_least(name, getattr(options, name), least)
    for name in ("placement_timeout", "grace", "grow_after"):
        check_most(name, getattr(options, name), MOST_SECONDS)


def _check_combinations(options: argparse.Namespace) -> None:
    if options.min_workers > options.workers:
        raise ConfigError(f"--min_workers={options.min_workers} is more than --workers={options.workers}: lower it.")
    if options.discover and not options.min_workers:
        raise ConfigError(
            f"--discover={options.discover!r} may ask for fewer workers, but --min_workers is not given: set how few"
            " may continue, for example --min_workers=1."
        )
    for name in ("min_workers", "standby", "elastic") if options.ps else ():
        if getattr(options, name):
            raise ConfigError(
                f"--{name} is not available with --ps={options.ps}: a worker that dies is restarted alone, without a"
                " restart of the job."
            )
    for name, instead in _NOT_ON_RAY.items() if options.on == "ray" else ():
        if getattr(options, name):
            raise ConfigError(f"--{name} is not available with --on=ray: {instead}.")
    if options.on == "local" and options.cpus_per_worker:
        raise ConfigError(
            f"--cpus_per_worker={options.cpus_per_worker} is for --on=ray: drop it; on this machine each worker gets an"
            " equal share of the cores."
        )
