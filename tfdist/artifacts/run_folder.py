"""The folder that holds all that a run leaves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.control.run_address import is_url

EVALUATOR_LOG, EVALUATOR_EVENTS = "logs/evaluator.jsonl", "tensorboard/evaluator"


def is_evaluators(name: str) -> bool:
    """Whether a file of a run, named from its folder on, is written by an evaluator beside it."""
    return name.startswith(("logs/evaluator.", f"{EVALUATOR_EVENTS}/"))


@contextlib.contextmanager
def written(config: Config) -> Iterator[None]:
    """A context that writes files of the run folder. Raises ConfigError where they cannot be."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{config.run.folder_flag} cannot be written ({error.strerror}): make room there, or choose another folder."
        ) from None


def run_folder(config: Config) -> Path:
    """RUN_DIR, made if it is not there. From now on nothing that this process makes can be written by other users."""
    folder = config.run.folder
    # What will be loaded again is written by nobody else; who may read it is the user's affair.
    os.umask(os.umask(0o077) | 0o002)
    try:
        # A working copy is nobody else's affair.
        folder.mkdir(0o700 if is_url(config.run.run_dir) else 0o777, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{config.run.folder_flag} cannot be made ({error.strerror}): choose a folder that can be written."
        ) from None
    return folder
