"""Draws combinations of models, data, options and runtimes, and compares tfdist's results with those of plain Keras.

    python scripts/fuzz.py --minutes=10 --seed=1              for ten minutes
    python scripts/fuzz.py --cases=200 --runtimes=mirrored:2,sockets:2
    python scripts/fuzz.py --minutes=60 --again=24 --tally=tests/fuzz/tally.json      prefers what was rarely drawn
    python scripts/fuzz.py --replay='{"kind": "train", ...}'  repeats one case, as a failure prints it

tests/fuzz/tally.json counts what all such runs since 2026-11-23 have compared; commit it with their findings.

Prints each difference with its shrunk case and a script. At the end, prints how often each feature was drawn with each
runtime. Exit code 1 if anything was wrong.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fuzz.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
