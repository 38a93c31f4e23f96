"""Makes a Cluster from what Kubernetes, or any system that numbers processes, tells a process about the others.

An Indexed Job numbers its pods in JOB_COMPLETION_INDEX; TFDIST_WORKERS and TFDIST_ADDRESS come from our job file, for
example 4 and digits-{index}.digits:2222. The addresses follow by rule, without a call to any server.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ClusterError
from tfdist.control.ranks import environment_number
from tfdist.control.tf_config import check_address


def from_kubernetes(environ: Mapping[str, str]) -> Cluster | None:
    """The Cluster of a pod of an Indexed Job of `tfdist.jobs`, by its variables; else None. Raises ClusterError."""
    if not environ.get("TFDIST_WORKERS") or environ["TFDIST_WORKERS"] == "1" or not environ.get("JOB_COMPLETION_INDEX"):
        return None
    size, rank = environment_number(environ, "TFDIST_WORKERS"), environment_number(environ, "JOB_COMPLETION_INDEX")
    template = environ.get("TFDIST_ADDRESS", "")
    if "{index}" not in template:
        raise ClusterError(f'TFDIST_ADDRESS="{template}" must hold {{index}}, as in digits-{{index}}.digits:2222.')
    if not rank < size:
        raise ClusterError(
            f"JOB_COMPLETION_INDEX={rank}, but TFDIST_WORKERS={size}: give the Job as many completions as"
            " TFDIST_WORKERS says."
        )
    addresses = [template.replace("{index}", str(index)) for index in range(size)]
    check_address(f"TFDIST_ADDRESS of worker {rank}", addresses[rank])
    return Cluster.of_workers(addresses, rank)
