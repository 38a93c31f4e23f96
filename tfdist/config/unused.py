"""Flags of a training that would have no effect, since the option they belong to is not chosen.

This covers only flags that do not count towards the digest, and only the start of a training: flags that an earlier
version accepted must not keep a run from being evaluated or resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tfdist.control.exit_codes import ConfigError

if TYPE_CHECKING:
    from tfdist.config.configuration import Config


class OnlyWith(NamedTuple):
    """A flag that has an effect only together with another flag."""

    flag: str
    other: str  # as the user would write it
    has_other: Callable[[Config], bool]


ONLY_WITH = (
    OnlyWith("pipe_schedule", "--strategy=mesh --mesh=pipe=N", lambda config: "pipe" in config.parallel.mesh),
    OnlyWith("max_rollbacks", "--on_nan=rollback", lambda config: config.loop.on_nan == "rollback"),
    *(
        OnlyWith(flag, "--backup_dir=FOLDER", lambda config: bool(config.checkpoint.backup_dir))
        for flag in ("backup_every", "double_backup", "delete_backup")
    ),
)


def check_used(config: Config, defaults: Config) -> None:
    """Raises ConfigError for a flag that differs from `defaults` and would have no effect."""
    values, usual = config.flat(), defaults.flat()
    for flag, other, has_other in ONLY_WITH:
        value = values[flag]
        if value != usual[flag] and not has_other(config):
            raise ConfigError(f"--{flag}={value} has no effect without {other}: add that, or drop it.")
