"""One worker of a parity run: trains rows of ROWS for 50 steps on one runtime, and writes the results.

    python -m tests.parity.worker OUT_DIR ROW,ROW [train flags]      with TF_CONFIG for more than one worker

Writes OUT_DIR/ROW-rank-K.npz: the weights, the evaluation, the training losses. One process runs all rows, because
starting TensorFlow takes longer than training them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

STEPS = 50
BASE = {
    "source": "digits",
    "steps": STEPS,
    "global_batch": 24,
    "accumulation": 1,
    "learning_rate": 0.02,
    "eval_batch": 64,
    "model": "tests.parity.models:conv_bn",
}
DENSE, TABLE = "tests.parity.models:dense", "tests.parity.models:table"

# name -> what differs from BASE
ROWS: dict[str, dict] = {
    "momentum": {"optimizer": "momentum"},
    "momentum_accumulation": {"optimizer": "momentum", "accumulation": 4, "model": DENSE},
    "momentum_clip_accumulation": {"optimizer": "momentum", "clip_norm": 0.5, "accumulation": 4, "model": DENSE},
    "momentum_uneven": {"optimizer": "momentum", "global_batch": 25},
    "adamw_accumulation_jit": {
        "optimizer": "adamw",
        "learning_rate": 0.002,
        "weight_decay": 0.1,
        "accumulation": 4,
        "jit_compile": True,
        "model": DENSE,
    },
    "adamw_clip_ema": {"optimizer": "adamw", "learning_rate": 0.002, "clip_norm": 0.5, "ema": 0.9, "model": DENSE},
    "sgd_table": {"optimizer": "sgd", "learning_rate": 2.0, "model": TABLE},
    "sgd_table_jit": {"optimizer": "sgd", "learning_rate": 2.0, "jit_compile": True, "model": TABLE},
    "sgd_table_clip": {"optimizer": "sgd", "learning_rate": 2.0, "clip_norm": 0.3, "model": TABLE},
    "adamw_table_accumulation": {"optimizer": "adamw", "learning_rate": 0.01, "accumulation": 4, "model": TABLE},
    "momentum_added": {
        "optimizer": "momentum",
        "model": "tests.parity.models:adds",
        "source": "tests.parity.models:weighted_digits",
        "on_nan": "skip",
    },
    "momentum_masked": {
        "optimizer": "momentum",
        "learning_rate": 0.005,
        "model": "tests.parity.models:masked",
        "source": "tests.parity.models:masked_digits",
    },
    "offset": {"optimizer": "momentum", "model": "tests.parity.models:offset"},
    "float16": {"optimizer": "momentum", "precision": "float16", "model": DENSE},
}
# Gradients travel as bfloat16. Compared with the row from which they are made, on one device, where nothing travels.
COMPRESSED = {f"{name}_bf16": ROWS[name] | {"compression": "bf16"} for name in ("momentum_accumulation", "sgd_table")}


def main(out: Path, rows: list[str], flags: list[str]) -> None:
    import numpy as np

    from tests.parity import lean
    from tfdist import build
    from tfdist.control.resolvers import resolve_cluster
    from tfdist.flags import parse

    config = parse(flags).config.replace(**BASE)
    runtime = build.start_runtime(config, resolve_cluster(os.environ))
    lean.prepare(oracle="--strategy=one_device" in flags)
    for name in rows:
        lean.next_model()
        job = build.compose(config.replace(**(ROWS | COMPRESSED)[name]), runtime)
        outputs = [job.step(iterators, 10) for iterators in [job.iterators(0)] for _ in range(STEPS // 10)]
        weights = {f"weight_{index}": value for index, value in enumerate(job.model.get_weights())}
        evaluation = job.evaluator()()
        np.savez(
            out / f"{name}-rank-{runtime.rank}.npz",
            losses=[output.means["loss"] for output in outputs],
            evaluation=[evaluation[key] for key in sorted(evaluation)],
            **weights,
        )
    runtime.close()
    print("parity worker: done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
