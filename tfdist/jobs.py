"""python -m tfdist.jobs: writes the job file of a run for Slurm or Kubernetes, and a Dockerfile.

  python -m tfdist.jobs slurm --nodes=4 --per_node=8 --gpus=1 --time=24:00:00 -- --flagfile=flags/gpt2_124m.flags >
  gpt2.sbatch
  python -m tfdist.jobs kubernetes --workers=4 --gpus=8 --image=registry/tfdist:1 --claim=runs -- --run_dir=/runs/gpt2
  --flagfile=flags/gpt2_124m.flags > gpt2.yaml
  python -m tfdist.jobs tfjob ...        the same for the Kubeflow training operator
  python -m tfdist.jobs slurm --nodes=2 -- script.py ARGS          a Keras script that calls tfdist.fit; the others, too
  python -m tfdist.jobs kubernetes --workers=2 --image=IMAGE --claim=runs -- -m tfdist.doctor --run_dir=/runs/first
  python -m tfdist.jobs dockerfile --cuda > Dockerfile             without --cuda for CPUs

Flags before `--` are this command's; those after it go to every worker, and flags of tfdist.train are checked here.
Workers find each other without a wrapper script (control/resolvers.py). A worker that is asked to end saves and ends
with exit code 42. The job is then started again and resumes from its newest snapshot, as after the other exit codes for
which a restart can help.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

from tfdist import flags
from tfdist.config import Config, iter_options
from tfdist.config.options import is_switch
from tfdist.config.strategies import strategy_or_undecided
from tfdist.control import exit_codes, jobspecs
from tfdist.control.command_parser import module_named_in, program_command, split_at_dashes
from tfdist.control.exit_codes import ConfigError
from tfdist.control.jobspecs.job_options import job_parser, parse_job_options
from tfdist.control.run_address import is_url
from tfdist.runtime.mesh import Mesh

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,51}[a-z0-9])?")  # of a Kubernetes service, leaving space for -workers-0-N
_NOT_NAMES = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")  # YAML does not read these as strings
_SBATCH_VALUE = r"[\w.,:%+@/=~\[\]-]*"
_PORT = 2222


def main(argv: list[str]) -> int:
    own_argv, train = split_at_dashes(argv)
    options = parse_job_options(own_argv, __doc__ or "")
    if options.kind == "dockerfile":
        text = jobspecs.render("dockerfile", vars(options))
    else:
        if train[:2] == ["-m", "tfdist.train"]:
            train = train[2:]
        program = module_named_in(train) or next((each for each in train[:1] if each.endswith(".py")), "")
        kind = job_parser("").kinds()[options.kind]
        config = None if program else flags.parse(train, usage="Flags of the workers:", before=kind).config.validate()
        if config:
            _check_workers(options, config)
        options.name = options.name or _name_of(config.run.run_dir if config else program.removesuffix(".py"))
        if not _NAME.fullmatch(options.name) or options.name in _NOT_NAMES:
            raise ConfigError(
                f"--name={options.name} is not a valid job name: use up to 53 of a-z, 0-9 and -, starting with a"
                " letter, and not a YAML keyword."
            )
        text = {"slurm": slurm, "kubernetes": kubernetes, "tfjob": tfjob}[options.kind](options, config, train)
    if options.output_file:
        try:
            Path(options.output_file).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--write={options.output_file} cannot be written ({error.strerror}): give a file in a folder that"
                " exists."
            ) from None
    else:
        print(text, end="")
    return 0


def _check_workers(options: argparse.Namespace, config: Config) -> None:
    """Raises ConfigError if the workers of a job cannot train with these flags."""
    strategy = config.strategy.strategy
    if strategy_or_undecided(strategy).parameter_servers:
        raise ConfigError(
            f"--strategy={strategy}: a job of kind {options.kind} has no parameter servers. Leave the strategy out, or"
            " start `python -m tfdist.launch --ps=1 -- ...` on one machine."
        )
    Mesh.parse(config.parallel.mesh, _worker_count(options))


def _worker_count(options: argparse.Namespace) -> int:
    return options.nodes * options.per_node if options.kind == "slurm" else options.workers


def slurm(options: argparse.Namespace, config: Config | None, arguments: list[str]) -> str:
    """Makes a batch script for sbatch. arguments: flags of tfdist.train, from which `config` was made; if that is None,
    a script, or -m and a module, with its arguments.
    """
    for name in ("partition", "account", "log"):
        if not re.fullmatch(_SBATCH_VALUE, getattr(options, name)):
            raise ConfigError(
                f"--{name}={getattr(options, name)!r} cannot be on an #SBATCH line: write it without spaces, quotes and"
                " the like."
            )
    try:
        python = shlex.split(options.python)
    except ValueError as error:
        raise ConfigError(f"--python={options.python} is not a command ({error}): close its quotes.") from None
    command = " ".join(map(jobspecs.bash_word, [*python, *_python_arguments(config, arguments)]))
    return jobspecs.render(
        "slurm",
        {
            **vars(options),
            "workers": _worker_count(options),
            "gpus_per_node": options.gpus * options.per_node,
            "output": options.log or f"{options.name}-%j.log",
            "command": command,
        },
    )


def kubernetes(options: argparse.Namespace, config: Config | None, arguments: list[str]) -> str:
    """Makes a JobSet, or an Indexed Job with a headless service. config, arguments: see slurm."""
    if options.jobset:
        values = {
            "subdomain": "",
            "address": f"{options.name}-workers-0-{{index}}.{options.name}:{_PORT}",
        }  # JobSet sets the subdomain
    else:
        values = {"subdomain": options.name, "address": f"{options.name}-{{index}}.{options.name}:{_PORT}"}
    pod = _pod(options, config, _command(config, arguments), values)
    return _with_fence("jobset" if options.jobset else "job", options, config, pod)


def tfjob(options: argparse.Namespace, config: Config | None, arguments: list[str]) -> str:
    """Makes a TFJob for the Kubeflow training operator. config, arguments: see slurm."""
    script = jobspecs.render("tfjob_command", {})
    lines = _pod(
        options,
        config,
        ["sh", "-c", script, "tfdist", *_command(config, arguments)],
        {"subdomain": "", "address": ""},
    ).splitlines()
    # The operator sets TF_CONFIG and the restart policy, and recognizes its container by name and port.
    first = lines.index("    env:")
    token = lines.index("    - name: TFDIST_JOB_TOKEN  # by which the workers know each other")
    lines = [line for line in [*lines[: first + 1], *lines[token:]] if not line.startswith("  restartPolicy:")]
    renamed = {
        "  - name: worker": "  - name: tensorflow",
        f"    - containerPort: {_PORT}": f"    - name: tfjob-port\n      containerPort: {_PORT}",
    }
    pod = "\n".join(renamed.get(line, line) for line in lines)
    return _with_fence("tfjob", options, config, pod)


def _with_fence(template: str, options: argparse.Namespace, config: Config | None, pod: str) -> str:
    """Renders a template for Kubernetes, with a network policy and a token that keep strangers out."""
    values = {
        **vars(options),
        **_quoted(options),
        "prometheus_port": config.telemetry.prometheus_port if config else 0,
        "in_namespace": options.namespace and f" --namespace={options.namespace}",
    }
    fence = {name: jobspecs.render(name, values).rstrip("\n") for name in ("network_policy", "token_note")}
    return jobspecs.render(template, {**values, **fence, "pod": pod, "backoff": options.max_restarts * options.workers})


def _python_arguments(config: Config | None, arguments: list[str]) -> list[str]:
    """Returns what follows `python` on a worker. config: None if the arguments name a program."""
    return ["-m", *(["tfdist.train", *arguments] if config else program_command(arguments))]


def _command(config: Config | None, arguments: list[str]) -> list[str]:
    """Returns the command that a container runs. Expands flag files here, as the image may not contain them.

    `$` is doubled, since Kubernetes would replace $(NAME).
    """
    arguments = _each_once(flags.expand_flagfiles(arguments)) if config else arguments
    return ["python", *(argument.replace("$", "$$") for argument in _python_arguments(config, arguments))]


def _each_once(arguments: list[str]) -> list[str]:
    """Returns flags of tfdist.train with each flag once, as --name=value: of several, the last one counts."""
    fields = {field.name: field for _, field in iter_options()}
    found: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, _ = argument.lstrip("-").partition("=")
        field = fields.get(name) or fields.get(name.removeprefix("no"))
        if field and not equals and not is_switch(field):
            argument += f"={next(rest)}"
        found[field.name if field else argument] = argument
    return list(found.values())


def _check_volume(options: argparse.Namespace, run_dir: str) -> None:
    """Raises ConfigError if a run that is not in an object store would be lost with its pods."""
    mount = options.mount.rstrip("/")
    if options.claim and not run_dir.startswith(f"{mount}/"):
        raise ConfigError(
            f"--run_dir={run_dir} is not on the volume that --claim={options.claim} mounts: use"
            f" --run_dir={mount}/{Path(run_dir).name}, or another --mount."
        )
    if not options.claim and options.workers > 1:
        raise ConfigError(
            "--claim is missing: name a PersistentVolumeClaim that all workers can write, since snapshots must outlive"
            " them, or give a URL as --run_dir."
        )


def _pod(options: argparse.Namespace, config: Config | None, command: list[str], values: dict[str, str]) -> str:
    if config and not is_url(config.run.run_dir):
        _check_volume(options, config.run.run_dir)
    if options.rdma and not re.fullmatch(r"[\w.-]+/[\w.-]+=[0-9]+", options.rdma):
        raise ConfigError(
            f"--rdma={options.rdma} is not RESOURCE=NUMBER: write for example rdma/hca_shared_devices_a=1, as your"
            " cluster's device plugin names it."
        )
    return jobspecs.render(
        "pod",
        {
            **vars(options),
            **_quoted(options),
            **values,
            "port": _PORT,
            "command": jobspecs.quoted_list(command),
            "rdma": re.sub("=(.*)", r': "\1"', options.rdma),
        },
    ).rstrip("\n")


def _quoted(options: argparse.Namespace) -> dict[str, str]:
    """Returns the values quoted for YAML, so that they are read as strings whatever they look like."""
    return {
        name: json.dumps(getattr(options, name))
        for name in ("image", "namespace", "claim", "mount", "memory")
        if getattr(options, name)
    }


def _name_of(run_dir: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", Path(run_dir).name.lower()).strip("-")[:53] or "tfdist"


if __name__ == "__main__":
    exit_codes.run_command(main, sys.argv[1:])
