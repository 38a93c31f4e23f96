"""One of two processes: trains three steps, rank 1 with its own gradients instead of the reduced ones, then compares weights.

    python -m tests.multi.skipped_reduction [train flags]
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    from tfdist import build
    from tfdist.artifacts import state
    from tfdist.control.cluster import resolve_cluster
    from tfdist.control.exit_codes import DivergedError
    from tfdist.flags import parse
    from tfdist.runtime.agreement import check_weights

    config = parse(sys.argv[1:]).config.replace(source="digits", model="mlp", steps=3, global_batch=24)
    runtime = build.start_runtime(config, resolve_cluster(os.environ))
    job = build.compose(config, runtime)
    variables = {key: value for key, value in state.collect(job.model, job.optimizer, job.step.variables).items() if key.startswith("model/")}
    iterators = job.iterators(0)
    job.step(iterators, 1)
    check_weights(runtime, state.to_host(variables), "at step 1")
    print("the same at first", flush=True)
    if runtime.rank == 1:
        reduce = runtime.all_reduce

        def all_reduce(tensors):
            reduced = reduce(tensors)
            return [tensor + 0.0 * other for tensor, other in zip(tensors[:-1], reduced[:-1], strict=True)] + reduced[-1:]

        runtime.all_reduce = all_reduce
    broken = build.compose(config, runtime)
    variables = {key: value for key, value in state.collect(broken.model, broken.optimizer, broken.step.variables).items() if key.startswith("model/")}
    broken.step(broken.iterators(0), 2)
    try:
        check_weights(runtime, state.to_host(variables), "at step 2")
    except DivergedError as error:
        print(f"caught: {error}", flush=True)
    runtime.barrier()
    runtime.close()
