"""The flags of `python -m tfdist.jobs`, read and checked."""

from __future__ import annotations

import argparse
import re
from typing import Any

from tfdist.control.command_parser import CommandParser, check_least, check_most
from tfdist.control.exit_codes import ConfigError

_NAME = (
    r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?",
    "lowercase letters, digits, - and ., as Kubernetes requires for names",
)
_NAMESPACE = (r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "the name of a namespace, up to 63 of a-z, 0-9 and -")
_QUANTITY = (r"\d+(\.\d+)?([KMGTP]i|[kMGTP])?", "an amount such as 16Gi")
_WORD = (r"[^\s\"'$`\\]+", "one word, such as registry/tfdist:latest")
# kind of file -> flag -> (pattern of its values, description of the pattern)
_FORMS = {
    "slurm": {
        "time": (
            r"(\d+|\d+-([01]?\d|2[0-3]))(:[0-5]?\d){0,2}|UNLIMITED|INFINITE",
            "minutes, 12:00:00 or 2-12:00:00, with minutes and seconds below 60, and hours below 24 after days",
        ),
        "memory": (r"\d+[KMGT]?", "an amount such as 64G"),
    },
    "kubernetes": {"namespace": _NAMESPACE, "claim": _NAME, "memory": _QUANTITY, "image": _WORD},
    "tfjob": {"namespace": _NAMESPACE, "claim": _NAME, "memory": _QUANTITY, "image": _WORD},
    "dockerfile": {"base": _WORD, "image": _WORD},
}
_NEEDED = ("image", "base")
_CPUS, _MEMORY_GI = 4, 16  # for each GPU of a worker, or for a worker without any
_MOST_SIGNAL_SECONDS = 65535  # of sbatch's --signal


class _Parser(CommandParser):
    """The parser of the command, and that of each kind of file."""

    def __init__(self, **options: Any):
        hint = (
            "write `python -m tfdist.jobs slurm|kubernetes|tfjob|dockerfile [flags] -- <flags of tfdist.train, or a"
            " script>`; `--help` lists them"
        )
        super().__init__(hint, **options)


def parse_job_options(argv: list[str], description: str) -> argparse.Namespace:
    """Parses and checks the flags before `--`. Raises ConfigError. --help prints `description` and the flags, and ends
    the process."""
    options = job_parser(description).parse_args(argv)
    if options.kind != "dockerfile":
        devices = max(1, options.gpus)
        options.cpus = _CPUS * devices if options.cpus is None else options.cpus
        options.memory = f"{_MEMORY_GI * devices}Gi" if options.memory is None else options.memory
    _check(options)
    return options


def job_parser(description: str) -> CommandParser:
    """Makes the parser of the flags, with a subparser for each kind of file."""
    parser = _Parser(prog="python -m tfdist.jobs", description=description)
    kinds = parser.add_subparsers(dest="kind", required=True, parser_class=_Parser)
    made = {
        kind: kinds.add_parser(kind, help=text)
        for kind, text in (
            ("slurm", "a batch script for sbatch"),
            ("kubernetes", "an Indexed Job, or with --jobset a JobSet"),
            ("tfjob", "a TFJob of the Kubeflow training operator"),
            ("dockerfile", "an image for them"),
        )
    }
    for kind, sub in made.items():
        sub.add_argument(
            "--write", dest="output_file", default="", metavar="FILE", help="write to this file, not to the terminal"
        )
        if kind != "dockerfile":
            _job_flags(sub)
    _slurm_flags(made["slurm"])
    for kind in ("kubernetes", "tfjob"):
        _kubernetes_flags(made[kind])
    made["kubernetes"].add_argument(
        "--jobset",
        action="store_true",
        help="a JobSet, which restarts all workers together; without it an Indexed Job",
    )
    _dockerfile_flags(made["dockerfile"])
    return parser


def _check(options: argparse.Namespace) -> None:
    for name, least in (
        ("nodes", 1),
        ("per_node", 1),
        ("workers", 1),
        ("gpus", 0),
        ("cpus", 1),
        ("grace", 1),
        ("max_restarts", 0),
    ):
        check_least(name, getattr(options, name, least), least)
    if options.kind == "slurm":
        check_most("grace", options.grace, _MOST_SIGNAL_SECONDS)
    for name, value in vars(options).items():
        if isinstance(value, str) and "\n" in value and name != "setup":
            raise ConfigError(f"--{name} contains a line break: write it on one line.")
    for name, (form, words) in _FORMS[options.kind].items():
        value = getattr(options, name)
        if (value or name in _NEEDED) and not re.fullmatch(form, value):
            raise ConfigError(f"--{name}={value}: give {words}.")


def _job_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="", help="of the job (default: the last part of --run_dir)")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each worker (default 0)")
    parser.add_argument("--cpus", type=int, help=f"cores of each worker (default {_CPUS}, or {_CPUS} for each GPU)")
    parser.add_argument("--grace", type=int, default=120, help="seconds to save in after SIGTERM (default 120)")
    parser.add_argument(
        "--max_restarts",
        type=int,
        default=10,
        help=(
            "restarts after errors; those after a requested save do not count if the engine can tell them apart"
            " (default 10)"
        ),
    )


def _dockerfile_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", default="python:3.12-slim", help="base image (default python:3.12-slim)")
    parser.add_argument("--image", default="tfdist:latest", help="name, for the comment")
    parser.add_argument("--mount", default="/runs", help="where the volume for runs is mounted (default /runs)")
    parser.add_argument(
        "--cuda", nargs="?", const=' "tensorflow[and-cuda]~=2.21.0"', default="", help="with TensorFlow's CUDA packages"
    )


def _slurm_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=1, help="nodes (default 1)")
    parser.add_argument(
        "--per_node", type=int, default=1, help="workers on each node (default 1; with --gpus=1, its GPUs)"
    )
    parser.add_argument("--time", default="24:00:00", help="time limit (default 24:00:00); the job resumes after it")
    parser.add_argument("--partition", default="", help="partition")
    parser.add_argument("--account", default="", help="account")
    parser.add_argument("--memory", default="", help="memory of each node, for example 64G")
    parser.add_argument("--log", default="", help="log file (default NAME-%%j.log)")
    parser.add_argument(
        "--python", default="python", help="how Python is started, for example 'apptainer exec image.sif python'"
    )
    parser.add_argument(
        "--setup", default="", help="shell line before the workers start, for example 'source .venv/bin/activate'"
    )


def _kubernetes_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=1, help="workers (pods)")
    parser.add_argument("--image", required=True, help="container image, see `tfdist.jobs dockerfile`")
    parser.add_argument("--namespace", default="", help="namespace")
    parser.add_argument("--claim", default="", help="PersistentVolumeClaim for the run folder, writable by all workers")
    parser.add_argument("--mount", default="/runs", help="where it is mounted (default /runs)")
    default = f"{_MEMORY_GI}Gi"
    parser.add_argument("--memory", help=f"memory of each worker (default {default}, or {default} for each GPU)")
    parser.add_argument(
        "--rdma", default="", help="RDMA resource of each worker, for example rdma/hca_shared_devices_a=1"
    )
