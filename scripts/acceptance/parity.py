"""python scripts/acceptance/parity.py OUT [--rehearse]: one step of SGD of every model and precision, on two devices.

Both devices start from the same weights and use the same batch. The changes of all weights (the gradients) are compared
by relative error: the norm of the difference divided by the norm. The limit is measured on the CPU: it is three times
the relative error that half precision causes in a gradient there, since two devices round in different places. GPUs
compute float32 products as TensorFloat-32, which has as many digits as float16, so float32 has the limit of float16.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from scripts.acceptance.training import IMAGES, TEXT, TRANSFORMER, fail, gpus, run, write_rows

MODELS = {
    "mlp": (*IMAGES, "--model=mlp"),
    "cnn": (*IMAGES, "--model=cnn"),
    "transformer": (*TEXT, *TRANSFORMER),
    "experts": (*TEXT, "--model=transformer", "--model_args=layers=2,width=64,heads=4,experts=4"),
    "resnet50": (*IMAGES, "--model=resnet50"),
    "vit": (*IMAGES, "--model=vit", "--model_args=layers=2"),
}
REHEARSED = ("mlp", "cnn", "transformer", "experts")
PRECISIONS = ("float32", "bfloat16", "float16")
TIMES = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--compute", default="", help="file to write, for the processes that this one starts")
    options = parser.parse_args()
    models = [name for name in MODELS if not options.rehearse or name in REHEARSED]
    if options.compute:
        compute(models, Path(options.compute))
        return
    found = gpus()
    if not found and not options.rehearse:
        fail("TensorFlow sees no GPU here: there is nothing to compare with the CPU.")
    options.out.mkdir(parents=True, exist_ok=True)
    flags = ["--rehearse"] if options.rehearse else []
    # Without a GPU, another number of threads changes the order of summation.
    other = (
        {"CUDA_VISIBLE_DEVICES": found[0]} if found else {"CUDA_VISIBLE_DEVICES": "-1", "TF_NUM_INTRAOP_THREADS": "2"}
    )
    for name, environment in (("cpu", {"CUDA_VISIBLE_DEVICES": "-1", "TF_NUM_INTRAOP_THREADS": "1"}), ("other", other)):
        command = [sys.executable, __file__, str(options.out), *flags, f"--compute={options.out / f'{name}.npz'}"]
        if code := run(command, **environment).returncode:
            fail(f"the steps on {name} ended with exit code {code}")
    rows = compared(np.load(options.out / "cpu.npz"), np.load(options.out / "other.npz"), models)
    write_rows(options.out, rows)
    wrong = [row["step"] for row in rows if not row["bar"] <= row["limit"]]
    if wrong:
        fail(f"{len(wrong)} of {len(rows)} steps differ by more than rounding: {', '.join(wrong)}")
    worst = max(rows, key=lambda row: row["bar"] / row["limit"])
    print(
        f"{len(rows)} steps are alike; nearest to its limit: {worst['step']}, {worst['bar']:.1e} of"
        f" {worst['limit']:.1e}"
    )


def compared(cpu: dict, other: dict, models: list[str]) -> list[dict]:
    """Returns a row for each step; its bar is the relative error."""
    rows = []
    for model in models:
        cost = {
            precision: distance(cpu[f"{model} {precision}"], cpu[f"{model} float32"]) for precision in PRECISIONS[1:]
        }
        for precision in PRECISIONS:
            name = f"{model} {precision}"
            limit = TIMES * cost["float16" if precision == "float32" else precision]
            losses = float(cpu[f"{name} loss"]), float(other[f"{name} loss"])
            found = distance(other[name], cpu[name])
            rows.append({"step": name, "loss on the CPU": losses[0], "on the other": losses[1], "difference": found})
            rows[-1] |= {"limit": limit, "bar": found}
    return rows


def distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def compute(models: list[str], path: Path) -> None:
    """Writes "MODEL PRECISION" -> change of all weights, and "MODEL PRECISION loss" -> loss."""
    import keras

    from tfdist import build, flags
    from tfdist.control.cluster import Cluster

    found = {}
    for model in models:
        for precision in PRECISIONS:
            keras.backend.clear_session()
            command = [
                *MODELS[model],
                f"--precision={precision}",
                "--strategy=one_device",
                "--optimizer=sgd",
                "--steps=1",
            ]
            config = flags.parse(
                [*command, "--global_batch=16", "--learning_rate=0.01", "--warmup_steps=0", "--loss_scale_initial=256"]
            ).config
            runtime = build.start_runtime(config, Cluster())
            job = build.compose(config, runtime)
            before = [variable.numpy() for variable in job.model.trainable_variables]
            output = job.step(job.iterators(0), 1)
            after = [variable.numpy() for variable in job.model.trainable_variables]
            name = f"{model} {precision}"
            found[name] = np.concatenate(
                [np.ravel(new - old).astype(np.float64) for new, old in zip(after, before, strict=True)]
            )
            found[f"{name} loss"] = output.means["loss"]
            print(f"{name}: loss {output.means['loss']:.5f}", flush=True)
            runtime.close()
    np.savez(path, **found)


if __name__ == "__main__":
    main()
