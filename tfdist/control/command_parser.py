"""The parser of commands that have their own flags before `--`. A mistake raises ConfigError with a sentence."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from tfdist.control.exit_codes import ConfigError


@dataclass(frozen=True)
class FlagValues:
    """A flag, for tab completion: its name with the dashes, and its possible values."""

    name: str
    values: tuple[str, ...] = ()  # empty: anything
    switch: bool = False  # takes no value


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations. `hint` is appended to argparse's error message, unless an unknown flag
    is spelled almost like one of the known flags, which is then suggested."""

    def __init__(self, hint: str, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.hint = hint

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, but refuses `--flag=--`, whose value argparse turns into an empty list."""
        for arg in args or ():
            if re.fullmatch(r"--?[^=\s]+=--", arg):
                self.error(f"{arg} sets no value for the flag")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--?[^\s=]+)", message)
        names = [flag.name for flag in self.flags()]
        near = difflib.get_close_matches(unknown.group(1), names, n=1, cutoff=0.8) if unknown else []
        if unknown and near:
            raise ConfigError(f"{unknown.group(1)} is not a flag of {self.prog}: did you mean {near[0]}?")
        raise ConfigError(f"{message}: {self.hint}.")

    def flags(self) -> list[FlagValues]:
        """Returns all flags, for tab completion."""
        return [
            FlagValues(action.option_strings[-1], tuple(map(str, action.choices or ())), action.nargs == 0)
            for action in self._actions
            if action.option_strings
        ]

    def kinds(self) -> dict[str, CommandParser]:
        """Returns the subparsers by name, the word that selects one."""
        return {
            name: parser
            for action in self._actions
            if isinstance(action.choices, dict)
            for name, parser in action.choices.items()
        }


def split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """Returns (the command's own flags, before `--`; the workers' flags, after it)."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def module_named_in(arguments: list[str]) -> str:
    """Returns the module of `-m MODULE ARGS`; "" for other arguments. Raises ConfigError for -m without a module."""
    if arguments[:1] != ["-m"]:
        return ""
    if not arguments[1:] or arguments[1].startswith("-"):
        raise ConfigError("-m needs a module name after it: write `-- -m tfdist.doctor`, for example.")
    return arguments[1]


def check_module(name: str) -> None:
    """Raises ConfigError if there is no module of this name."""
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:  # another module is missing: the import will say so when it is run
        found = not f"{name}.".startswith(f"{error.name}.")
    except ImportError:  # raised by the package that contains it
        found = True
    except ValueError:  # not a valid module name
        found = False
    if not found:
        raise ConfigError(f"-m {name}: there is no such module on the Python path; set PYTHONPATH to its folder.")


def program_command(program: list[str]) -> list[str]:
    """Returns the arguments of `python -m` on a worker for a program given as SCRIPT ARGS or -m MODULE ARGS. tfdist's
    commands end with its exit codes by themselves; other programs are run by tfdist.script, which provides the codes.
    """
    if module_named_in(program).partition(".")[0] == "tfdist":
        return program[1:]
    return ["tfdist.script", *program]


def check_least(flag: str, value: float, least: float) -> None:
    """Raises ConfigError for a flag whose value is too small."""
    if not value >= least:
        what = "not a number" if value != value else "too small"
        raise ConfigError(f"--{flag}={value} is {what}: it must be at least {least:g}.")


def check_most(flag: str, value: float, most: float) -> None:
    """Raises ConfigError for a flag whose value is too large."""
    if value > most:
        raise ConfigError(f"--{flag}={value} is too large: it must be at most {most:.12g}.")
