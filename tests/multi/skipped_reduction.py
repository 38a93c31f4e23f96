"""One of two processes: rank 1 goes on with its own gradients instead of the reduced ones, then all compare weights.

    python -m tests.multi.skipped_reduction [train flags]
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    from tfdist import build
    from tfdist.control.cluster import resolve_cluster
    from tfdist.control.exit_codes import DivergedError
    from tfdist.flags import parse
    from tfdist.runtime.agreement import check_weights

    config = parse(sys.argv[1:]).config.replace(source="digits", model="mlp", model_args="dropout=0.1", steps=3, global_batch=24)
    runtime = build.start_runtime(config, resolve_cluster(os.environ))
    job = build.compose(config, runtime)
    job.step(job.iterators(0), 1)
    check_weights(runtime, job.model, "at step 1")  # the seed generators of its dropout differ already
    print("the same at first", flush=True)
    if runtime.rank == 1:
        reduce = runtime.all_reduce

        def all_reduce(tensors):
            reduced = reduce(tensors)
            return [tensor + 0.0 * other for tensor, other in zip(tensors[:-1], reduced[:-1], strict=True)] + reduced[-1:]

        runtime.all_reduce = all_reduce
    broken = build.compose(config, runtime)
    broken.step(broken.iterators(0), 2)
    try:
        check_weights(runtime, broken.model, "at step 2")
    except DivergedError as error:
        print(f"caught: {error}", flush=True)
    runtime.barrier()
    runtime.close()
