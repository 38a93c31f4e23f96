"""Finds the cluster: the environment of a process -> Cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tfdist.control.cluster import Cluster
from tfdist.control.horovod_env import from_horovod
from tfdist.control.kubernetes import from_kubernetes
from tfdist.control.slurm import from_slurm
from tfdist.control.tf_config import from_tf_config

# Tried in this order; the first that answers wins: what the user set, then launchers, then engines around them. A new
# kind of cluster is one function and an entry here.
RESOLVERS: list[Callable[[Mapping[str, str]], Cluster | None]] = [
    from_tf_config,
    from_horovod,
    from_slurm,
    from_kubernetes,
]


def resolve_cluster(environ: Mapping[str, str]) -> Cluster:
    """The cluster that the environment describes; alone if no resolver finds one. Raises ClusterError."""
    for resolver in RESOLVERS:
        cluster = resolver(environ)
        if cluster is not None:
            return cluster
    return Cluster()
