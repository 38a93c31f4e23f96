"""Draws mistakes at random (flags, flag files, TF_CONFIG, run folders, modules, scripts) and checks how they end.

    python scripts/mistakes.py --count=200 --seed=1
    python scripts/mistakes.py --only=1:17 --verbose       repeats one of them, with its output

Each must end with the documented exit code and one sentence that names the mistake. Prints those that do not, and a
table of kinds and exit codes. Exit code 1 if there was a problem.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.mistakes.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
