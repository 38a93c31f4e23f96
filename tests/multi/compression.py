"""Trains with every compression, for tests/multi/test_compression.py: one process of two.

    python -m tests.multi.compression digits|text [all]   {"kind": [final loss, bytes sent, bytes on the wire]}
    python -m tests.multi.compression resumed FOLDER      stops and resumes from a snapshot: {"kind": what differs}

"at once": without the initial steps with uncompressed gradients. A job with such steps has both ways of reduction in
its graph. So its bytes on the wire are measured with a job without them.
"""

from __future__ import annotations

import functools
import json
import os
import sys

import numpy as np

JOBS = {
    "digits": {
        "source": "digits",
        "model": "mlp",
        "model_args": "widths=(128,)",
        "global_batch": 64,
        "optimizer": "momentum",
        "learning_rate": 0.02,
        "schedule": "cosine",
        "steps": 120,
        "compression_after": 24,
    },
    "text": {
        "source": "text",
        "source_args": "max_bytes=400000",
        "sequence_length": 32,
        "model": "transformer",
        "model_args": "layers=1,width=64,heads=2",
        "objective": "next_token",
        "global_batch": 32,
        "optimizer": "adamw",
        "learning_rate": 2e-3,
        "schedule": "cosine",
        "steps": 300,
        "compression_after": 100,
    },
}
KINDS = (
    "none",
    "fp16",
    "bf16",
    "int8",
    "topk",
    "topk without feedback",
    "powersgd",
    "topk at once",
    "powersgd at once",
    "topk at once without feedback",
)
IN_DEFAULT_SUITE = tuple(kind for kind in KINDS if kind not in ("fp16", "bf16", "powersgd at once"))


def main(name: str, kinds: tuple[str, ...]) -> None:
    import keras

    from tfdist import build
    from tfdist.config import Config
    from tfdist.control.resolvers import resolve_cluster
    from tfdist.training.parallel.compression import Compression

    base = Config().replace(
        strategy="mesh", communication="ring", collective_timeout=60.0, accumulation=1, **JOBS[name]
    )
    runtime = build.start_runtime(base, resolve_cluster(os.environ))

    def make(kind: str):
        keras.backend.clear_session(free_memory=False)
        after = 0 if "at once" in kind else base.parallel.compression_after
        job = build.compose(base.replace(compression=kind.partition(" ")[0], compression_after=after), runtime)
        update = job.step.update
        if kind.endswith("without feedback"):
            update.compression = Compression("topk", update.trainable, update.replicas, after, feedback=False)
        return job, job.iterators(0)

    found, steps = {}, base.run.steps
    for kind in kinds:
        job, iterators = make(kind)
        if kind != "powersgd at once":  # only its bytes are checked, not its loss
            job.step(iterators, steps - steps // 10)
        loss = job.step(iterators, steps // 10).means["loss"]
        update = job.step.update
        wire = sum(
            operation.inputs[0].shape.num_elements() * operation.inputs[0].dtype.size
            for operation in operations(job.step._function)
            if "_of_ranks_" in operation.name and operation.type.startswith("Collective")
        )
        sent = (
            update.compression.bytes()
            if update.compression
            else sum(4 * variable.shape.num_elements() for variable in update.sources())
        )
        found[kind] = [loss, sent, wire]
    if runtime.rank == 0:
        print("found " + json.dumps(found), flush=True)
    runtime.close()


def resumed(folder: str) -> None:
    """Runs the second 3 of 6 steps, and the same in another job, bit for bit: first from a snapshot in shards, then
    from a whole one through the chief."""
    import keras

    from tfdist import build
    from tfdist.artifacts.sharded_snapshots import ShardedSnapshotFolder
    from tfdist.config import Config
    from tfdist.control.resolvers import resolve_cluster
    from tfdist.training.parallel.sharded_state import ShardedState

    base = (
        Config()
        .replace(strategy="mesh", communication="ring", collective_timeout=60.0, accumulation=1, **JOBS["digits"])
        .replace(compression_after=0)
    )
    runtime = build.start_runtime(base, resolve_cluster(os.environ))
    store = ShardedSnapshotFolder(folder, lambda step: None, runtime.rank, runtime.size, "resumed", 60.0)

    def compose(kind: str):
        keras.backend.clear_session(free_memory=False)
        return build.compose(base.replace(compression=kind), runtime)

    def train(job, begin: int) -> None:
        job.step(job.iterators(begin * job.plan.global_batch), 3)

    def through_the_chief(state, arrays):
        arrays = state.fitted(arrays)
        given = [
            np.asarray(arrays[key] if runtime.rank == 0 else np.zeros(shape, dtype))
            for key, (_, shape, dtype) in sorted(state.table().items())
        ]
        state.assign(dict(zip(sorted(state.table()), runtime.broadcast(given), strict=True)))

    found = {}
    for number, kind in enumerate(("int8", "topk", "powersgd")):
        job = compose(kind)
        train(job, 0)
        store.write(number, job.state.to_shards(), {"variables": job.state.table()})
        whole = job.state.to_host()
        train(job, 3)
        expected = job.state.to_host()
        runtime.barrier()
        prefix = f"{store.path(number)}/state-{number}"
        other = compose(kind)
        for restore in (
            functools.partial(ShardedState.read, prefix=prefix),
            functools.partial(through_the_chief, arrays=whole),
        ):
            restore(other.state)
            train(other, 3)
            ended = other.state.to_host()
            found.setdefault(kind, []).append(
                [
                    key
                    for key in expected
                    if expected[key].tobytes() != ended[key].tobytes() or ("error" in key and not expected[key].any())
                ]
            )
    if runtime.rank == 0:
        print("found " + json.dumps(found), flush=True)
    runtime.close()


def operations(function):
    """Yields all operations of a traced function, including those of its loops and branches."""
    graph = function._list_all_concrete_functions()[0].graph
    yield from graph.get_operations()
    for inner in graph._functions.values():
        yield from inner.graph.get_operations()


if __name__ == "__main__":
    if sys.argv[1] == "resumed":
        resumed(sys.argv[2])
    else:
        main(sys.argv[1], KINDS if "all" in sys.argv else IN_DEFAULT_SUITE)
