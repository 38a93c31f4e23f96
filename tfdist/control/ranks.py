"""Parses ranks: lists in flags, numbers in environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfdist.control.exit_codes import ClusterError, ConfigError


def parse_ranks(flag: str, text: str, size: int | None = None) -> set[int] | None:
    """Returns the ranks that a flag lists, for example 0,1; None for "all". Raises ConfigError.

    size: the number of ranks, if it is known.
    """
    if text == "all":
        return None
    ranks = text.split(",")
    if not all(rank.isdecimal() and (size is None or int(rank) < size) for rank in ranks):
        known = "" if size is None else f" from 0 to {size - 1}"
        raise ConfigError(f"--{flag}={text} must be all, or ranks{known} such as 0,1.")
    return {int(rank) for rank in ranks}


def environment_number(environ: Mapping[str, str], name: str) -> int:
    """Returns a whole number from an environment variable that a job system has set. Raises ClusterError."""
    if not re.fullmatch("[0-9]{1,9}", environ[name]):
        raise ClusterError(
            f"{name}={environ[name]} is not a whole number of at least 0: leave it to the job system, or set TF_CONFIG."
        )
    return int(environ[name])
