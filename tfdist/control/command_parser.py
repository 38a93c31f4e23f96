"""How the commands that have flags of their own before `--` read them: a mistake is a ConfigError with a sentence."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from tfdist.control.exit_codes import ConfigError


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations. `hint` follows what argparse says of a mistake."""

    def __init__(self, hint: str, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.hint = hint

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: {self.hint}.")


def split_at_dashes(argv: list[str]) -> tuple[list[str], list[str]]:
    """The command's own flags, before `--`, and those of the workers, after it."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def check_least(flag: str, value: float, least: float) -> None:
    """Raises ConfigError for a flag whose value is too small."""
    if not value >= least:  # also catches NaN
        raise ConfigError(f"--{flag}={value} is too small: it must be at least {least:g}.")
