"""python scripts/acceptance/workers.py OUT [--rehearse]: two workers against one process, tfdist.train and tfdist.fit.

With two GPUs, the workers use NCCL. Otherwise they use TensorFlow's collectives over gRPC on the CPU, since a GPU can
hold only one process of a NCCL group. tfdist itself checks that the workers' weights are equal (exit code 8).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from scripts.acceptance.training import IMAGES, TEXT, TRANSFORMER, fail, gpus, records, run, train_well, write_rows

STEPS = 10
LIMIT = 2e-3  # relative error of a loss after ten steps; GPUs round products to eleven bits
RUNS = {
    "cnn": (*IMAGES, "--model=cnn", "--global_batch=32"),
    "transformer": (*TEXT, *TRANSFORMER, "--global_batch=16"),
}
FIT = """
import json, sys
import keras, numpy as np, tfdist
tfdist.init(communication=sys.argv[2])
keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x = rng.normal(size=(256, 16, 16, 3)).astype("float32")
y = rng.integers(0, 10, 256)
stack = [keras.Input((16, 16, 3)), keras.layers.Conv2D(16, 3), keras.layers.BatchNormalization(), keras.layers.ReLU()]
model = keras.Sequential([*stack, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)])
model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
history = tfdist.fit(model, x, y, batch_size=32, epochs=3, verbose=0)
if tfdist.is_chief():
    open(sys.argv[1], "w").write(json.dumps(history.history["loss"]))
"""


def main(out: Path) -> None:
    count = len(gpus())
    kind = "nccl" if count > 1 else "ring"
    hidden = {} if count > 1 else {"CUDA_VISIBLE_DEVICES": "-1"}
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, flags in RUNS.items():
        flags = (*flags, f"--steps={STEPS}", "--log_every=1", "--optimizer=momentum", "--learning_rate=0.05")
        train_well((*flags, "--strategy=one_device"), out / "one", **hidden)
        two = (*flags, "--strategy=multi_worker", f"--communication={kind}")
        train_well(two, out / "two", ["--workers=2"], **hidden)
        losses = [[each["train/loss"] for each in records(out / folder, "train")] for folder in ("one", "two")]
        rows.append(row(f"tfdist.train, {name}, {kind}", *losses))
    script = out / "fit.py"
    script.write_text(FIT)
    for folder, start in (("one", ["tfdist.script"]), ("two", ["tfdist.launch", "--workers=2", "--"])):
        arguments = [str(script), str(out / f"fit-{folder}.json"), kind if folder == "two" else "auto"]
        if code := run([sys.executable, "-m", *start, *arguments], **(hidden or one_gpu(folder))).returncode:
            fail(f"tfdist.fit with {folder} ended with exit code {code}")
    rows.append(
        row(f"tfdist.fit, {kind}", *(json.loads((out / f"fit-{each}.json").read_text()) for each in ("one", "two")))
    )
    write_rows(out, rows)
    wrong = [each["what"] for each in rows if not each["bar"] <= LIMIT]
    if wrong:
        fail(f"two workers compute something else than one: {', '.join(wrong)}")
    print(
        f"{len(rows)} jobs of two workers by {kind}: at most {max(each['bar'] for each in rows):.1e} from one process"
    )


def one_gpu(folder: str) -> dict[str, str]:
    """Gives the single process one GPU, as each worker has."""
    return {"CUDA_VISIBLE_DEVICES": next(iter(gpus()), "-1")} if folder == "one" else {}


def row(what: str, one: list[float], two: list[float]) -> dict:
    off = max(abs(a - b) / abs(a) for a, b in zip(one, two, strict=True))
    return {
        "what": what,
        "last loss of one": one[-1],
        "of two": two[-1],
        "largest difference": off,
        "bar": off,
        "limit": LIMIT,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
