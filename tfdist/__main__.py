"""tfdist COMMAND ...: all commands under one name. Each is the same as `python -m tfdist.COMMAND ...`."""

from __future__ import annotations

import difflib
import os
import runpy
import sys

from tfdist import __version__
from tfdist.control import exit_codes
from tfdist.control.exit_codes import ConfigError

COMMANDS = {
    "train": "train a model, as one worker of the cluster that TF_CONFIG describes",
    "launch": "start several workers on this machine, or on a Ray cluster, and supervise them",
    "fit": "run your Keras script that calls tfdist.fit, as one worker",
    "evaluate": "evaluate a snapshot or an export of a run, or follow a running job",
    "report": "make a page about a run, or about several side by side",
    "plan": "estimate the memory, time and layout of a run before it is started",
    "doctor": "check whether this machine, or the workers of a cluster, are fit to train",
    "jobs": "write the job file of a run for Slurm or Kubernetes, or a Dockerfile",
    "comm": "measure how fast the workers exchange data",
    "script": "the same as fit",
    "completion": "print a script with which bash, zsh or fish complete these commands and their flags",
}
MODULES = {"fit": "script"}  # tfdist.fit is a function


def main() -> None:
    """The entry point of `tfdist` and `python -m tfdist`. Ends the process."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # as with `python -m`: the user's modules may be there
    name, *arguments = sys.argv[1:] or [""]
    if name not in COMMANDS:
        exit_codes.run_command(_without_command, [name])
    module = f"tfdist.{MODULES.get(name, name)}"
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _without_command(argv: list[str]) -> int:
    """Handles --help, --version, and mistakes. Raises ConfigError."""
    name = argv[0]
    if name == "--version":
        print(f"tfdist {__version__}")
        return 0
    if name in ("--help", "-h", "help", ""):
        print(help_text())
        if not name:
            raise ConfigError("No command is given: write tfdist COMMAND, one of those above.")
        return 0
    if name.startswith("-"):
        raise ConfigError(f"{name} is in the place of the command: write tfdist COMMAND {name}.")
    near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "`tfdist --help` lists them."
    raise ConfigError(f"{name!r} is not a command of tfdist: {hint}")


def help_text() -> str:
    """Returns the text of `tfdist --help`."""
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "tfdist COMMAND ...: a distributed trainer for Keras 3 models on TensorFlow.",
            "",
            *(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()),
            "",
            (
                "`tfdist COMMAND --help` explains one of them. Each is also `python -m tfdist.COMMAND`; fit is"
                " tfdist.script."
            ),
        ]
    )


if __name__ == "__main__":
    main()
