"""Flags of a training that would do nothing, since what they are for is not chosen.

Only those that count for no digest, and only at the start of a training: the flags of a run that an earlier version
took must not keep it from being evaluated, nor from going on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tfdist.control.exit_codes import ConfigError

if TYPE_CHECKING:
    from tfdist.config.configuration import Config


class OnlyWith(NamedTuple):
    """A flag that does something with another flag only."""

    flag: str
    other: str  # how that is written
    has_other: Callable[[Config], bool]


ONLY_WITH = (
    OnlyWith("pipe_schedule", "--strategy=mesh --mesh=pipe=N", lambda config: "pipe" in config.parallel.mesh),
    OnlyWith("max_rollbacks", "--on_nan=rollback", lambda config: config.loop.on_nan == "rollback"),
)


def check_used(config: Config, defaults: Config) -> None:
    """Raises ConfigError for a flag that is set to something else than in `defaults`, and would do nothing."""
    values, usual = config.flat(), defaults.flat()
    for flag, other, has_other in ONLY_WITH:
        value = values[flag]
        if value != usual[flag] and not has_other(config):
            raise ConfigError(f"--{flag}={value} does nothing without {other}: add that, or drop it.")
