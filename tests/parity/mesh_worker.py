"""One worker of the parity runs on meshes: trains every row of ROWS that needs this many workers, and writes what came out.

    python -m tests.parity.mesh_worker OUT_DIR one      every job of ROWS on one device
    python -m tests.parity.mesh_worker OUT_DIR mesh     every row with as many workers as TF_CONFIG lists
    ... ROW,ROW                                         only these

Writes OUT_DIR/KIND/ROW.npz: whole weights, optimizer slots and moving averages, losses, gradient norms, an evaluation. One
process runs all rows, because starting TensorFlow takes longer than training them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

STEPS = 20
DENSE = {"source": "digits", "model": "tests.parity.models:dense", "global_batch": 24, "learning_rate": 0.02, "eval_batch": 64, "eval_samples": 128}
CONV = {**DENSE, "model": "tests.parity.models:conv_bn"}
TEXT = {"source": "synthetic", "source_args": "task=text,vocab=61,samples=64,eval_samples=16", "sequence_length": 8, "model": "transformer",
        "model_args": "layers=1,width=32,heads=4", "objective": "next_token", "global_batch": 12, "learning_rate": 0.005}
SGD = {"optimizer": "sgd", "clip_norm": 0.5}
MOMENTUM = {"optimizer": "momentum", "clip_norm": 0.5}
ADAMW = {"optimizer": "adamw", "learning_rate": 0.002, "weight_decay": 0.1, "clip_norm": 0.5}
EMA = {**ADAMW, "ema": 0.9}
SPLIT = {"accumulation": 2}


class Row(NamedTuple):
    """One run: on `workers` of `mesh`, what is computed, and how it is spread."""

    workers: int
    mesh: str
    job: dict
    spread: dict


ROWS: dict[str, Row] = {
    "data2": Row(2, "data=2", CONV | MOMENTUM, {}),
    "data2_text": Row(2, "data=2", TEXT | ADAMW | SPLIT, {}),
    **{f"zero{stage}_{workers}_{name}": Row(workers, "", DENSE | rule, {"zero": stage})
       for stage in (1, 2, 3) for workers in (2, 3) for name, rule in (("sgd", SGD), ("adamw", EMA | SPLIT))},
    **{f"zero{stage}_2_conv": Row(2, "", CONV | MOMENTUM, {"zero": stage}) for stage in (1, 2)},
    **{f"zero{stage}_2_text": Row(2, "", TEXT | ADAMW | SPLIT, {"zero": stage}) for stage in (2, 3)},
    "zero3_2_float16": Row(2, "", DENSE | {"optimizer": "momentum", "precision": "float16"}, {"zero": 3}),
    "model2": Row(2, "model=2", TEXT | ADAMW, {}),
    "model2_smoothing": Row(2, "model=2", TEXT | SGD | {"label_smoothing": 0.1}, {}),
    "model2_zero0_split": Row(2, "model=2", TEXT | ADAMW | SPLIT, {}),
    "model4": Row(4, "model=4", TEXT | ADAMW, {}),
    "data2_model2": Row(4, "data=2,model=2", TEXT | ADAMW, {}),
    **{f"data2_model2_zero{stage}": Row(4, "data=2,model=2", TEXT | EMA | SPLIT, {"zero": stage}) for stage in (1, 3)},
}


def job_of(name: str) -> str:
    """The first row that computes the same as this one; one device computes it once."""
    return next(other for other, row in ROWS.items() if row.job == ROWS[name].job)


JOBS = {name: row for name, row in ROWS.items() if job_of(name) == name}


def main(out: Path, kind: str, chosen: list[str]) -> None:
    import keras
    import numpy as np

    from tfdist import build
    from tfdist.artifacts import state
    from tfdist.config import Config
    from tfdist.control.cluster import resolve_cluster
    from tfdist.runtime.mesh import Mesh
    from tfdist.runtime.mesh_runtime import MeshRuntime

    cluster = resolve_cluster(os.environ)
    base = Config().replace(steps=STEPS, global_batch=12, accumulation=1, strategy="one_device" if kind == "one" else "mesh", communication="ring", collective_timeout=60.0)
    runtime = build.start_runtime(base, cluster)
    for name, row in (JOBS if kind == "one" else ROWS).items():
        if (kind == "mesh" and row.workers != cluster.size) or (chosen and name not in chosen):
            continue
        keras.backend.clear_session()
        config = base.replace(**row.job)
        if kind == "mesh":
            config = config.replace(mesh=row.mesh, **row.spread)
            runtime = MeshRuntime(Mesh.parse(row.mesh, cluster.size), cluster, runtime._world, 60.0)
        job = build.compose(config, runtime)
        outputs = [job.step(iterators, 5) for iterators in [job.iterators(0)] for _ in range(STEPS // 5)]
        evaluation = job.evaluator()()
        arrays = job.state.to_host() if job.state else state.to_host(state.collect(job.model, job.optimizer, job.step.variables))
        if runtime.rank == 0:
            np.savez(out / kind / f"{name}.npz", losses=[output.means["loss"] for output in outputs], norms=[output.gradient_norm for output in outputs],
                     evaluation=[evaluation[key] for key in sorted(evaluation)], **arrays)
    runtime.barrier()
    print("mesh worker: done", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(",") if len(sys.argv) > 3 else [])
