"""Finds the cluster: makes a Cluster from the environment of a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ClusterError
from tfdist.control.horovod_env import from_horovod
from tfdist.control.ranks import environment_number
from tfdist.control.slurm import from_slurm
from tfdist.control.tf_config import check_address, from_tf_config

_OF_A_POD = ("TFDIST_WORKERS", "JOB_COMPLETION_INDEX", "TFDIST_ADDRESS")


def from_kubernetes(environ: Mapping[str, str]) -> Cluster | None:
    """Makes a Cluster from the variables of a pod of a `tfdist.jobs` Indexed Job; None elsewhere. Raises ClusterError.

    Kubernetes, or any system that numbers processes, sets JOB_COMPLETION_INDEX to this process's number. Our job file
    sets TFDIST_WORKERS and TFDIST_ADDRESS, for example to 4 and digits-{index}.digits:2222. All addresses follow from
    this template, without a call to any server.
    """
    if environ.get("TFDIST_WORKERS") == "1":
        return Cluster()
    if not (environ.get("TFDIST_WORKERS") or environ.get("TFDIST_ADDRESS")):
        return None
    if missing := [name for name in _OF_A_POD if not environ.get(name)]:  # else each worker would train alone
        there = " and ".join(f"{name}={environ[name]}" for name in _OF_A_POD if environ.get(name))
        raise ClusterError(
            f"{there} is set, but {' and '.join(missing)} is not: set all of {', '.join(_OF_A_POD)}, or none of the"
            " TFDIST_ variables."
        )
    size, rank = environment_number(environ, "TFDIST_WORKERS"), environment_number(environ, "JOB_COMPLETION_INDEX")
    template = environ.get("TFDIST_ADDRESS", "")
    if "{index}" not in template:
        raise ClusterError(f'TFDIST_ADDRESS="{template}" must contain {{index}}, as in digits-{{index}}.digits:2222.')
    if not rank < size:
        raise ClusterError(
            f"JOB_COMPLETION_INDEX={rank}, but TFDIST_WORKERS={size}: give the Job as many completions as"
            " TFDIST_WORKERS."
        )
    addresses = [template.replace("{index}", str(index)) for index in range(size)]
    check_address(f"TFDIST_ADDRESS of worker {rank}", addresses[rank])
    return Cluster.of_workers(addresses, rank)


# Tried in this order; the first that returns a Cluster wins: what the user has set, then launchers, then the engines
# around them. To support a new kind of cluster, write one function and add it here.
RESOLVERS: list[Callable[[Mapping[str, str]], Cluster | None]] = [
    from_tf_config,
    from_horovod,
    from_slurm,
    from_kubernetes,
]


# Of launchers that tell a process its rank, but not the addresses of the others: rank, number of processes, name.
_WITHOUT_ADDRESSES = (
    ("PMI_RANK", "PMI_SIZE", "mpiexec (of MPICH or Intel MPI)"),
    ("RANK", "WORLD_SIZE", "torchrun, or the like,"),
)


def resolve_cluster(environ: Mapping[str, str]) -> Cluster:
    """Returns the cluster that the environment describes; a single process if no resolver finds one.

    Raises ClusterError.
    """
    return _found(environ) or Cluster()


def cluster_to_join(environ: Mapping[str, str]) -> Cluster:
    """`resolve_cluster` for a process that trains. Raises ClusterError, too, where a launcher has started several
    processes and no resolver finds a cluster: each would train alone."""
    cluster = _found(environ)
    for rank, size, launcher in () if cluster else _WITHOUT_ADDRESSES:
        count = environ.get(size, "")
        if rank in environ and count.isdecimal() and int(count) > 1:
            raise ClusterError(
                f"{rank}={environ[rank]} and {size}={count} say that {launcher} started {count} processes, but not at"
                f" which addresses: start them with tfdist.launch, or set TF_CONFIG or {', '.join(_OF_A_POD)}; or set"
                " TFDIST_WORKERS=1 if each is to train alone."
            )
    return cluster or Cluster()


def _found(environ: Mapping[str, str]) -> Cluster | None:
    return next((cluster for resolver in RESOLVERS if (cluster := resolver(environ)) is not None), None)
