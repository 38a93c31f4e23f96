"""The folder with all files of a run."""

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
    """Whether a file, named relative to the run folder, is written by an evaluator that follows the run."""
    return name.startswith(("logs/evaluator.", f"{EVALUATOR_EVENTS}/"))


@contextlib.contextmanager
def written(config: Config) -> Iterator[None]:
    """Context manager around writes to the run folder. Raises ConfigError if they fail."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{config.run.folder_flag} cannot be written ({error.strerror}): make room there, or choose another folder."
        ) from None


def run_folder(config: Config) -> Path:
    """RUN_DIR, made if it does not exist. From now on other users cannot write to anything that this process makes."""
    folder = config.run.folder
    # Other users must not be able to write what will be loaded again; who may read it is up to the user.
    os.umask(os.umask(0o077) | 0o002)
    try:
        # A working copy is private.
        folder.mkdir(0o700 if is_url(config.run.run_dir) else 0o777, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{config.run.folder_flag} cannot be created ({error.strerror}): choose a folder that can be written."
        ) from None
    return folder
