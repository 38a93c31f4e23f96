"""One worker of the audit of meshes: traces steps as if on a GPU, and writes what it found. It computes nothing.

    python -m tests.gpu.mesh_worker OUT_DIR [ROW,ROW]

Takes the ROWS of tests/parity/mesh_worker.py for as many workers as TF_CONFIG lists. Writes OUT_DIR/ROW-RANK.json: the
audit, and the collectives in the order in which they are launched.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path


def main(out: Path, chosen: list[str]) -> None:
    from tests.gpu.combinations import of_step
    from tests.parity import lean
    from tests.parity.mesh_worker import ROWS
    from tfdist import build
    from tfdist.config import Config
    from tfdist.control.resolvers import resolve_cluster
    from tfdist.runtime.launch_order import recorded
    from tfdist.runtime.mesh import Mesh
    from tfdist.runtime.mesh_runtime import MeshRuntime
    from tfdist.runtime.orderly_exit import say_goodbye

    lean.prepare()
    cluster = resolve_cluster(os.environ)
    base = Config().replace(
        steps=2, global_batch=12, accumulation=1, strategy="mesh", communication="ring", collective_timeout=120.0
    )
    world = build.start_runtime(base, cluster)._world
    for name, row in ROWS.items():
        if row.workers != cluster.size or (chosen and name not in chosen):
            continue
        lean.next_model()
        config = base.replace(**row.job, **row.spread, mesh=row.mesh)
        runtime = MeshRuntime(Mesh.parse(row.mesh, cluster.size), cluster, world, 120.0)
        job = build.compose(config, runtime)
        for group in runtime._groups.values():
            group.nccl = True  # as where tensors are on GPUs
        with recorded() as launches:
            found = of_step(job)
        report = {"audit": dataclasses.asdict(found), "launches": launches}
        (out / f"{name}-{runtime.rank}.json").write_text(json.dumps(report))
        runtime.barrier()
    print("audit: done", flush=True)
    say_goodbye(cluster, world.strategy)  # other ranks may still be in the last barrier


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(",") if len(sys.argv) > 2 else [])
