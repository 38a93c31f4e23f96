"""Names of the trackers and where their functions are. No tool is imported, so an unknown name is reported at once."""

from __future__ import annotations

from tfdist.control.exit_codes import ConfigError

TRACKERS = {
    "tensorboard": "tfdist.telemetry.tensorboard:track",
    "csv": "tfdist.telemetry.csv_files:track",
    "mlflow": "tfdist.telemetry.mlflow:track",
    "wandb": "tfdist.telemetry.wandb:track",
}


def names_in(trackers: str) -> list[str]:
    """Returns the names that --trackers lists. Raises ConfigError if it lists `none` together with others."""
    chosen = [name for name in trackers.split(",") if name not in ("", "none")]
    if chosen and "none" in trackers.split(","):
        raise ConfigError(f"--trackers={trackers} names {chosen[0]} and none: drop one of them.")
    return chosen
