"""One worker of the parity runs on meshes: trains every row of ROWS that needs this many workers, and writes the
results.

    python -m tests.parity.mesh_worker OUT_DIR one      every job of ROWS on one device
    python -m tests.parity.mesh_worker OUT_DIR mesh     every row with as many workers as TF_CONFIG lists
    python -m tests.parity.mesh_worker OUT_DIR refused  every job of REFUSED on model=2
    ... ROW,ROW                                         only these

Writes OUT_DIR/KIND/ROW.npz: whole weights, optimizer slots and moving averages, losses, gradient norms, an evaluation,
and the memory of rank 0: the peak of a step in bytes and, for the rows on memory, the bytes that it holds. One process
runs all rows, because starting TensorFlow takes longer than training them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

STEPS = 20
MODELS = "tests.parity.models"
DENSE = {
    "source": "digits",
    "model": "tests.parity.models:dense",
    "global_batch": 24,
    "learning_rate": 0.02,
    "eval_batch": 64,
    "eval_samples": 128,
}
CONV = {**DENSE, "model": "tests.parity.models:conv_bn"}
TEXT = {
    "source": "synthetic",
    "source_args": "task=text,vocab=61,samples=64,eval_samples=16",
    "sequence_length": 8,
    "model": "transformer",
    "model_args": "layers=1,width=32,heads=4",
    "objective": "next_token",
    "global_batch": 12,
    "learning_rate": 0.005,
}
SGD = {"optimizer": "sgd", "clip_norm": 0.5}
MOMENTUM = {"optimizer": "momentum", "clip_norm": 0.5}
ADAMW = {
    "optimizer": "adamw",
    "learning_rate": 0.002,
    "weight_decay": 0.1,
    "clip_norm": 0.5,
    "weight_decay_exclude": "bias,gamma,beta,dense/kernel,mlp_up",
}  # excludes layers, too, where they are sharded or cut
EMA = {**ADAMW, "ema": 0.9}
DEEP = {
    **TEXT,
    "model_args": "layers=2,width=32,heads=4,dropout=0.1",
    "global_batch": 8,
    "accumulation": 4,
}  # dropout: the masks are those of one device
SPLIT = {"accumulation": 2}
# Each sequence is routed by itself, so what is dropped here (a tenth) does not depend on how sequences are distributed.
EXPERTS = {
    **TEXT,
    **EMA,
    **SPLIT,
    "model_args": "layers=1,width=32,heads=4,experts=4,capacity=0.9,balance=0.1",
    "global_batch": 16,
}

# Losses that layers add in each block, and regularizers of weights, one of which two stages share.
ADDED = {**DENSE, **SGD, "model": "tests.parity.models:blocks", "accumulation": 4}

# Variables on which the loss does not depend; weight decay would change them.
IDLE = {**DENSE, **EMA, "model": "tests.parity.models:idle", "accumulation": 2, "weight_decay_exclude": "bias"}

# One stage of a pipeline has nothing to train.
FROZEN = {**DENSE, **EMA, "model": "tests.parity.models:frozen", "accumulation": 2, "clip_norm": 0.5}

# A user's own model, which tfdist tries whole and cut.
AROUND = {
    name: {**TEXT, **ADAMW, "model": f"{MODELS}:around", "model_args": f"kind={name}"} for name in ("scaled", "head")
}

DEEPER = {**DEEP, "model_args": "layers=3,width=32,heads=4,dropout=0.1"}
PLAIN = {**DEEP, "model_args": "layers=3,width=32,heads=4"}
LONG = {
    **TEXT,
    "source_args": "task=text,vocab=61,samples=64,eval_samples=8",
    "sequence_length": 64,
    "model_args": "layers=2,width=128,heads=4",
    "global_batch": 32,
    "accumulation": 8,
}  # with tensors of 256 KB and more, which the allocator counts
PIPES = {
    "gpipe": {"pipe_schedule": "gpipe"},
    "1f1b": {},
    "interleaved": {"pipe_chunks": 2},
    "cut": {"pipe_cut": "block_00", "recompute": "block"},
}


class Row(NamedTuple):
    """One run on `workers` workers and `mesh`. job: what is computed. spread: how it is distributed."""

    workers: int
    mesh: str
    job: dict
    spread: dict
    then: tuple[tuple[str, dict], ...] = ()  # other meshes, with their own `spread`, on which the run continues


ROWS: dict[str, Row] = {
    "data2": Row(2, "data=2", CONV | MOMENTUM, {}),
    **{
        f"zero{stage}_{workers}_{name}": Row(workers, "", DENSE | rule, {"zero": stage})
        for stage in (1, 2, 3)
        for workers in (2, 3)
        for name, rule in (("sgd", SGD), ("adamw", EMA | SPLIT))
    },
    "zero2_2_conv": Row(2, "", CONV | MOMENTUM, {"zero": 2}),
    "zero3_2_float16": Row(2, "", DENSE | {"optimizer": "momentum", "precision": "float16"}, {"zero": 3}),
    "model2": Row(2, "model=2", TEXT | ADAMW, {}),
    "model2_around": Row(2, "model=2", AROUND["scaled"], {}, (("", {"zero": 1}),)),
    "model2_head": Row(2, "model=2", AROUND["head"], {}),
    "model2_smoothing": Row(2, "model=2", TEXT | ADAMW | {"label_smoothing": 0.1}, {}),
    "zero3_2_recompute": Row(2, "", TEXT | ADAMW | SPLIT, {"zero": 3, "recompute": "block"}),
    "model2_sequence": Row(
        2, "model=2", TEXT | EMA | SPLIT, {"sequence_parallel": True, "zero": 1, "recompute": "block"}
    ),
    "model2_recompute": Row(2, "model=2", TEXT | ADAMW, {"recompute": "attention"}),
    **{f"pipe2_{name}": Row(2, "pipe=2", DEEP | ADAMW, options) for name, options in PIPES.items()},
    **{
        f"pipe2_{optimizer}": Row(
            2, "pipe=2", PLAIN | {"optimizer": optimizer, "weight_decay": 0.1, "learning_rate": 0.002}, {}
        )
        for optimizer in ("lamb", "muon")
    },
    **{f"pipe2_added_{name}": Row(2, "pipe=2", ADDED, options) for name, options in PIPES.items()},
    **{
        f"{name}_idle": Row(2, mesh, IDLE, options)
        for name, mesh, options in (
            ("zero0", "", {}),
            ("zero1", "", {"zero": 1, "recompute": "block"}),
            ("zero2", "", {"zero": 2}),
            ("zero3", "", {"zero": 3}),
            ("pipe2", "pipe=2", {}),
        )
    },
    "pipe2_frozen": Row(2, "pipe=2", FROZEN, {"pipe_cut": "block_01"}),
    **{
        f"pipe2_data2_frozen_zero{stage}": Row(
            4, "pipe=2", FROZEN, {"pipe_cut": "block_01", "zero": stage}, (("", {"zero": 0}),)
        )
        for stage in (0, 1, 2, 3)
    },
    **{
        f"zero{stage}_2_subclassed": Row(2, "", DENSE | MOMENTUM | {"model": f"{MODELS}:subclassed"}, {"zero": stage})
        for stage in (0, 1, 3)
    },
    "pipe2_data2_added": Row(4, "pipe=2", ADDED, {}),
    "model2_added": Row(2, "model=2", ADDED, {"recompute": "block"}),
    "pipe2_model2_added": Row(4, "pipe=2,model=2", ADDED, {}),
    **{f"pipe4_{name}": Row(4, "pipe=4", DEEPER | ADAMW, PIPES[name]) for name in ("gpipe", "1f1b")},
    **{f"pipe2_{name}_peak": Row(2, "pipe=2", LONG | ADAMW, PIPES[name]) for name in ("gpipe", "1f1b")},
    "pipe2_model2": Row(4, "pipe=2,model=2", PLAIN | ADAMW, {"recompute": "block"}),
    "data2_pipe2_zero1": Row(4, "pipe=2,data=2", PLAIN | EMA, {"zero": 1}),
    "pipe2_data2_model2_zero3": Row(8, "pipe=2,data=2,model=2", PLAIN | ADAMW, {"zero": 3}),
    "expert2": Row(2, "expert=2", EXPERTS, {}),
    "expert2_zero3_recompute": Row(2, "expert=2", EXPERTS, {"zero": 3, "recompute": "block"}),
    "data2_expert2_zero1": Row(4, "data=2,expert=2", EXPERTS, {"zero": 1}, (("expert=4", {"zero": 0}),)),
    "expert2_model2": Row(4, "expert=2,model=2", EXPERTS, {"recompute": "block"}),
    "data2_model2_sequence": Row(4, "data=2,model=2", TEXT | EMA | SPLIT, {"sequence_parallel": True, "zero": 2}),
    "hierarchical4": Row(4, "", DENSE | EMA | SPLIT, {"all_reduce": "hierarchical", "workers_per_host": 2}),
    "model4": Row(4, "model=4", TEXT | ADAMW, {}),
    "data2_model2": Row(4, "data=2,model=2", TEXT | ADAMW, {}),
    **{
        f"zero{stage}_{workers}_memory": Row(workers, "", DENSE | ADAMW, {"zero": stage})
        for stage in (0, 1, 2, 3)
        for workers in (2, 4)
    },
    "resharded": Row(
        4, "", TEXT | EMA | SPLIT, {"zero": 3}, (("data=2,model=2", {"zero": 3}), ("pipe=2", {"zero": 1}))
    ),
}

# Models that are cut by the names of their layers, and then compute something else.
REFUSED: dict[str, dict] = {
    "gated": {**DENSE, "model": f"{MODELS}:gated"},
    "log_softmax": {**TEXT, "model": f"{MODELS}:around", "model_args": "kind=log_softmax"},
    "head_of_some_positions": {**AROUND["head"], "sequence_parallel": True},
}


def job_of(name: str) -> str:
    """Returns the first row with the same job as this one; one device computes each job once."""
    return next(other for other, row in ROWS.items() if row.job == ROWS[name].job)


JOBS = {name: row for name, row in ROWS.items() if job_of(name) == name}


def main(out: Path, kind: str, chosen: list[str]) -> None:
    import numpy as np
    import tensorflow as tf

    from tests.parity import lean
    from tfdist import build
    from tfdist.artifacts.sharded_snapshots import ShardedSnapshotFolder
    from tfdist.config import Config
    from tfdist.control.resolvers import resolve_cluster
    from tfdist.runtime.mesh import Mesh
    from tfdist.runtime.mesh_runtime import MeshRuntime

    cluster = resolve_cluster(os.environ)
    base = Config().replace(
        steps=STEPS,
        global_batch=12,
        accumulation=1,
        strategy="one_device" if kind == "one" else "mesh",
        communication="ring",
        collective_timeout=120.0,
        heartbeat_timeout=60.0,
    )
    runtime = build.start_runtime(base, cluster)
    lean.prepare(oracle=kind == "one")
    if kind == "refused":
        runtime = MeshRuntime(Mesh.parse("model=2", 2), cluster, runtime._world, 120.0)
        refused(base.replace(mesh="model=2"), runtime, out)
        return
    for name, row in (JOBS if kind == "one" else ROWS).items():
        if (kind == "mesh" and row.workers != cluster.size) or (chosen and name not in chosen):
            continue
        legs = ((row.mesh, row.spread), *row.then) if kind == "mesh" else ((row.mesh, {}),)
        results: dict[str, list] = {"losses": [], "norms": [], "regularization": []}
        arrays: dict[str, np.ndarray] = {}
        store = ShardedSnapshotFolder(
            str(out / kind / name), lambda step: None, runtime.rank, runtime.size, "leg", 60.0
        )
        for leg, (mesh, spread) in enumerate(legs):
            lean.next_model(collect=name.endswith("peak"))  # what is left of other rows would count
            config = base.replace(**row.job, **spread)
            if kind == "mesh":
                config = config.replace(mesh=mesh)
                runtime = MeshRuntime(Mesh.parse(mesh, cluster.size), cluster, runtime._world, 120.0)
            job = build.compose(config, runtime)
            if name.endswith("memory"):  # nothing to train
                continue
            first, last = leg * STEPS // len(legs), (leg + 1) * STEPS // len(legs)
            if leg % 2:
                job.state.read(f"{store.path(leg - 1)}/state-{leg - 1}")
            elif leg:
                assign(job, arrays)
            iterators = job.iterators(first * job.plan.global_batch)
            for step in range(first, last):
                if step == STEPS - 1:
                    before = allocated("current")
                    tf.config.experimental.reset_memory_stats("CPU:0")
                output = job.step(iterators, 1)
                results["losses"].append(output.means["loss"])
                results["norms"].append(output.gradient_norm)
                results["regularization"].append(output.means.get("regularization", 0.0))
            if last == STEPS:
                peak = allocated("peak") - before  # of the last step
            arrays = collect(job)
            if kind == "mesh" and row.then:  # every other leg resumes from a snapshot that all ranks have written
                store.write(leg, job.state.to_shards(), {"variables": job.state.table()})
                runtime.barrier()
        held = bytes_held(job) if name.endswith("memory") else []
        if name.endswith("memory"):
            if runtime.rank == 0:
                np.savez(out / kind / f"{name}.npz", held=held)
            continue
        evaluation = job.evaluator()()
        if runtime.rank == 0:
            np.savez(
                out / kind / f"{name}.npz",
                **results,
                evaluation=[evaluation[key] for key in sorted(evaluation)],
                held=held,
                peak=peak,
                **arrays,
            )
    runtime.close()
    print("mesh worker: done", flush=True)


def refused(base, runtime, out: Path) -> None:
    """Writes OUT_DIR/NAME-RANK.txt: the error message; empty if the model is not refused."""
    from tests.parity import lean
    from tfdist import build
    from tfdist.control.exit_codes import ConfigError

    for name, job in REFUSED.items():
        lean.next_model()
        sentence = ""
        try:
            build.compose(base.replace(**job), runtime)
        except ConfigError as error:
            sentence = str(error)
        (out / f"{name}-{runtime.rank}.txt").write_text(sentence)
    runtime.close()


def allocated(what: str) -> int:
    """Returns the bytes that TensorFlow's allocator has given out. what: "current" or "peak"."""
    import tensorflow as tf

    return tf.config.experimental.get_memory_info("CPU:0")[what]


def collect(job) -> dict:
    """Returns the whole state, on the chief."""
    from tfdist.artifacts import state

    return (
        job.state.to_host() if job.state else state.to_host(state.collect(job.model, job.optimizer, job.step.variables))
    )


def assign(job, arrays: dict) -> None:
    """Sets the state to the chief's arrays, as a restore does."""
    import numpy as np

    table = job.state.table()
    given = [arrays.get(key, np.zeros(shape, dtype)) for key, (_, shape, dtype) in table.items()]
    job.state.assign(dict(zip(table, job.runtime.broadcast(given), strict=True)))


def bytes_held(job) -> list[int]:
    """Returns the bytes of [parameters, gradients kept between micro-batches, optimizer's copy and slots] of this
    worker.
    """
    import numpy as np
    import tensorflow as tf

    from tfdist.training.replica_gradients import ones_of

    job.step.replica.begin_backward = ones_of  # without the clock, which knows no micro-batch outside a step
    update = job.step.update
    weights = [variable._value for variable in job.model.trainable_variables]
    weights = [weight for weight in weights if weight is not None] or update.sources()
    batch = job.iterators(0)[0].element_spec
    step, micro, scale = (tf.TensorSpec([], dtype) for dtype in (tf.int64, tf.int32, tf.float32))
    one = tf.function(job.step.replica.of_micro_batch, autograph=False).get_concrete_function(step, micro, scale, batch)
    kept = one.structured_outputs.gradients
    own = {id(weight) for weight in weights}
    others = [
        variable.value
        for variable in [*getattr(update, "optimized", ()), *job.optimizer.variables]
        if id(variable.value) not in own
    ]
    return [
        sum(int(np.prod(tensor.shape)) * tensor.dtype.size for tensor in tensors) for tensors in (weights, kept, others)
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(",") if len(sys.argv) > 3 else [])
