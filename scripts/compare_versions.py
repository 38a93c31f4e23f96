"""Do two checkouts of tfdist compute the same, bit for bit? For changes that must not change a result.

    python scripts/compare_versions.py OTHER_CHECKOUT [--only=NAME,NAME] [--keep=FOLDER]

Trains the ten small runs of RUNS with this checkout and with the other one. Compares every array of their last
snapshots, and every logged value except times, speeds and memory. Exit code 0 if all are equal. Takes about five
minutes on two cores. Both use the Python that runs this script.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))
from tests.e2e.job import ENVIRONMENT, records, snapshot  # noqa: E402

DIGITS = ["--source=digits", "--model=cnn", "--model_args=widths=(8,)", "--global_batch=32", "--optimizer=momentum"]
TEXT = ["--source=text", "--sequence_length=16", "--model=transformer", "--model_args=layers=2,width=32,heads=4"]
TEXT += ["--optimizer=adamw", "--learning_rate=1e-3", "--global_batch=8"]
IMAGES = ["--source=synthetic", "--source_args=shape=(32,32,3),classes=10,samples=64,eval_samples=8"]
COMMON = ["--deterministic", "--steps=12", "--save_every=6", "--log_every=4", "--eval_samples=64", "--export=none"]
COMMON += ["--noplot", "--seed=3"]

# name -> (flags of the launcher, flags of the run); if the first is None, the script FIT is run
RUNS: dict[str, tuple[list[str] | None, list[str]]] = {
    "cnn": (["--workers=2"], [*DIGITS, "--strategy=multi_worker"]),
    "transformer": (["--workers=2"], [*TEXT, "--strategy=sockets", "--clip_norm=1"]),
    "resnet50": (["--workers=1"], [*IMAGES, "--model=resnet50", "--global_batch=4", "--optimizer=sgd"]),
    "float16": (["--workers=1"], [*DIGITS, "--precision=float16", "--strategy=mirrored", "--virtual_devices=2"]),
    "accumulation": (["--workers=2"], [*DIGITS, "--model=mlp", "--model_args=", "--accumulation=4", "--ema=0.9"]),
    "zero3": (["--workers=2"], [*TEXT, "--strategy=mesh", "--zero=3"]),
    "pipeline": (["--workers=2"], [*TEXT, "--strategy=mesh", "--mesh=pipe=2", "--accumulation=4"]),
    "horovod": (["--workers=2"], [*DIGITS, "--strategy=horovod"]),
    "parameter_server": (["--workers=2", "--ps=1"], [*DIGITS, "--strategy=parameter_server", "--ps_mode=sync"]),
    "fit": (None, []),
}

FIT = """
import sys, json
import keras, numpy as np
import tfdist
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.BatchNormalization(),
                          keras.layers.ReLU(), keras.layers.Dropout(0.2), keras.layers.Dense(3)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
rng = np.random.default_rng(0)
x, y = rng.normal(size=(100, 8)).astype("float32"), rng.integers(0, 3, 100)
history = tfdist.fit(model, x, y, batch_size=16, epochs=3, verbose=0, validation_split=0.2)
if tfdist.is_chief():
    np.savez(sys.argv[1] + "/weights.npz", *model.get_weights())
    json.dump(history.history, open(sys.argv[1] + "/history.json", "w"))
"""

_OF_TIME = ("perf/", "pause/", "phase/", "memory/", "startup/", "time/", "save/write_s", "save/bytes")


def train(checkout: Path, name: str, folder: Path) -> dict[str, object]:
    """Makes one run with a checkout. Returns name -> value that must be equal."""
    launch, flags = RUNS[name]
    folder.mkdir(parents=True)
    if launch is None:
        script = folder / "fit.py"
        script.write_text(FIT)
        command = ["--workers=2", "--", str(script), str(folder)]
    else:
        command = [*launch, "--", f"--run_dir={folder}", *flags, *COMMON]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(checkout)}
    ended = subprocess.run(
        [sys.executable, "-m", "tfdist.launch", *command],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if ended.returncode:
        raise SystemExit(f"{name} ended with {ended.returncode} in {checkout}:\n{ended.stdout}{ended.stderr}")
    if launch is None:
        with np.load(folder / "weights.npz") as weights:
            return {"history": json.loads((folder / "history.json").read_text()), **weights}
    values = {
        f"{record['kind']} at step {record['step']}: {key}": value
        for record in records(folder)
        if record["kind"] in ("train", "eval")
        for key, value in record["values"].items()
        if not key.startswith(_OF_TIME)
    }
    return values | snapshot(folder, 12)


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    return repr(a) == repr(b)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="another checkout of tfdist")
    parser.add_argument("--only", default=",".join(RUNS), help="names of runs")
    parser.add_argument("--keep", type=Path, help="a folder for the runs; by default they are removed")
    arguments = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        for name in arguments.only.split(","):
            theirs = train(arguments.other.resolve(), name, folder / "other" / name)
            ours = train(HERE, name, folder / "here" / name)
            wrong = sorted(key for key in {*ours, *theirs} if not same(ours.get(key), theirs.get(key)))
            different += bool(wrong)
            verdict = f"DIFFERENT in {len(wrong)}: {', '.join(wrong[:5])}" if wrong else "the same"
            print(f"{name}: {len(ours)} arrays and values, {verdict}", flush=True)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
