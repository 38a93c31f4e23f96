"""python -m tfdist.evaluate: evaluates a snapshot or an export of a run, or follows a running job.

  python -m tfdist.evaluate --run_dir=runs/first                       the newest valid snapshot
  python -m tfdist.evaluate --run_dir=runs/first --at_step=500         that one
  python -m tfdist.evaluate --run_dir=runs/first --model_file=runs/first/export/model.keras
  python -m tfdist.evaluate --run_dir=runs/first --follow              each new snapshot, until training is over

The run's own flags are read from RUN_DIR/flags.txt; flags given here win over them, except those that only training
uses (its length, its schedule, XLA). In a cluster, TF_CONFIG with the task type "evaluator" makes `tfdist.train` do the
same as --follow, by the flags of its own command line alone: give it those of the workers.
"""

from __future__ import annotations

import sys
from typing import Any

from tfdist.control import exit_codes


def main(argv: list[str]) -> int:
    from tfdist.run import snapshot_evaluation

    return snapshot_evaluation.main(argv, usage=__doc__ or "")


def evaluate(*args: Any, **kwargs: Any) -> Any:
    """Calls `evaluate` in keras_fit/api.py."""
    from tfdist.keras_fit import api

    return api.evaluate(*args, **kwargs)


if __name__ == "__main__":
    exit_codes.run_command(main, sys.argv[1:])
else:
    # The package has a function of this name. Importing this file would replace it by the module.
    sys.modules[__name__] = evaluate  # type: ignore[assignment] - Python allows any object there
