"""Reads Horovod's environment (who started this process, with which rank) and makes the variables that Horovod needs.

There are three ways to start N processes with --strategy=horovod:

  horovodrun -np N        gives every process HOROVOD_RANK, HOROVOD_SIZE, ... and runs the rendezvous server itself
  mpirun -np N            of Open MPI: gives OMPI_COMM_WORLD_RANK, ...; rank 0 runs the rendezvous server (this Horovod
                          has no MPI)
  tfdist.launch, TF_CONFIG  gives all addresses; rank 0 runs the rendezvous server at its own address

The rendezvous server is a small key-value store over HTTP in which Gloo's processes find each other's addresses.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ClusterError

ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
# Variables that `placement` may set in a process that got its rank from addresses. They must not be mistaken for those
# of a launcher.
WRITTEN = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
    "HOROVOD_HOSTNAME",
    ADDRESS,
    PORT,
)
_HOROVOD, _OPEN_MPI = "HOROVOD_", "OMPI_COMM_WORLD_"
_MPI_JOB_NAMES = (
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "OMPI_MCA_orte_hnp_uri",
)  # at least one of them is set, to the same value in all processes
_FIRST_PORT, _PORTS = 20000, 10000  # below the ephemeral ports of Linux


@dataclass(frozen=True)
class Placement:
    """The settings that Horovod needs before hvd.init()."""

    variables: Mapping[str, str]  # to be added to the environment
    server: tuple[str, int] | None  # host and port of the rendezvous server; None if this process is alone
    serve: bool  # whether our rank 0 runs the server; else the launcher does
    local_rank: int = 0  # among the processes of this machine


def from_horovod(environ: Mapping[str, str]) -> Cluster | None:
    """Makes a Cluster from the variables of horovodrun or of Open MPI's mpirun; None if they are not set.

    The Cluster has no addresses: only Horovod's own collectives can connect its processes. Raises ClusterError.
    """
    if environ.get("HOROVOD_ELASTIC"):
        raise ClusterError(
            "horovodrun started this process in its elastic mode (HOROVOD_ELASTIC=1; by --host-discovery-script or"
            " --min-np), in which it would reassign ranks without tfdist knowing: use `python -m tfdist.launch"
            " --elastic --workers=N --min_workers=M -- --strategy=horovod ...`, or drop these flags of horovodrun."
        )
    for prefix, launcher in ((_HOROVOD, "horovodrun"), (_OPEN_MPI, "mpirun")):
        if f"{prefix}RANK" in environ and f"{prefix}SIZE" in environ:
            rank, size = _number(environ, f"{prefix}RANK"), _number(environ, f"{prefix}SIZE")
            if not 0 <= rank < size:
                raise ClusterError(
                    f"{prefix}RANK={rank} must be from 0 to {prefix}SIZE - 1 = {size - 1}: start the job with"
                    f" {launcher}, which sets both."
                )
            local = _number(environ, f"{prefix}LOCAL_RANK") if f"{prefix}LOCAL_RANK" in environ else 0
            return Cluster("worker", rank, rank, size, started_by=launcher, launcher_local_rank=local)
    return None


def placement(cluster: Cluster, environ: Mapping[str, str]) -> Placement:
    """Returns the settings that Horovod needs in this process. Raises ClusterError if it could not find its peers."""
    if cluster.started_by == "horovodrun":
        if cluster.size > 1 and ADDRESS not in environ:
            raise ClusterError(
                f"HOROVOD_SIZE={cluster.size}, but {ADDRESS} is not set: start the job with horovodrun, which sets it,"
                " or set TF_CONFIG."
            )
        server = (environ[ADDRESS], _number(environ, PORT)) if cluster.size > 1 else None
        return Placement(
            {}, server, False, _number(environ, "HOROVOD_LOCAL_RANK") if "HOROVOD_LOCAL_RANK" in environ else 0
        )
    if cluster.size == 1:
        return Placement({}, None, False)
    return _of_mpi(cluster, environ) if cluster.started_by == "mpirun" else _of_addresses(cluster)


def _of_addresses(cluster: Cluster) -> Placement:
    """Returns the settings for processes with known addresses. Those with the same host are on one machine."""
    hosts = cluster.hosts
    if hosts[0].startswith("["):
        raise ClusterError(
            f"--strategy=horovod: {cluster.name(0)} has an IPv6 address, which Horovod's rendezvous cannot use: use a"
            " host name or an IPv4 address in TF_CONFIG."
        )
    server = (hosts[0], int(cluster.peers[0].rpartition(":")[2]))
    local_ranks = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    # Machines may have different numbers of processes. The n-th process of each is in the n-th group across machines.
    across = [rank for rank in range(cluster.size) if local_ranks[rank] == local_ranks[cluster.rank]]
    host, local_rank = hosts[cluster.rank], local_ranks[cluster.rank]
    return Placement(
        {
            **_variables(server, host, cluster),
            "HOROVOD_LOCAL_RANK": str(local_rank),
            "HOROVOD_LOCAL_SIZE": str(hosts.count(host)),
            "HOROVOD_CROSS_RANK": str(across.index(cluster.rank)),
            "HOROVOD_CROSS_SIZE": str(len(across)),
        },
        server,
        True,
        local_rank,
    )


def _of_mpi(cluster: Cluster, environ: Mapping[str, str]) -> Placement:
    local_rank, local_size = _number(environ, f"{_OPEN_MPI}LOCAL_RANK"), _number(environ, f"{_OPEN_MPI}LOCAL_SIZE")
    if ADDRESS not in environ and local_size != cluster.size:
        raise ClusterError(
            f"mpirun started {cluster.size} processes on several machines, but {ADDRESS} is not set: add -x"
            f" {ADDRESS}=HOST, the machine of rank 0."
        )
    server = (environ.get(ADDRESS, "127.0.0.1"), _number(environ, PORT) if PORT in environ else _port(environ))
    # mpirun does not tell which ranks share a machine. So each rank counts as a separate machine; this would matter
    # only for hierarchical reduction.
    return Placement(
        {
            **_variables(server, f"rank-{cluster.rank}", cluster),
            "HOROVOD_LOCAL_RANK": "0",
            "HOROVOD_LOCAL_SIZE": "1",
            "HOROVOD_CROSS_RANK": str(cluster.rank),
            "HOROVOD_CROSS_SIZE": str(cluster.size),
        },
        server,
        True,
        local_rank,
    )


def _variables(server: tuple[str, int], host: str, cluster: Cluster) -> dict[str, str]:
    return {
        ADDRESS: server[0],
        PORT: str(server[1]),
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_RANK": str(cluster.rank),
        "HOROVOD_SIZE": str(cluster.size),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def _port(environ: Mapping[str, str]) -> int:
    """Returns a port that is the same in all processes of an MPI job, and probably differs between jobs."""
    name = next((environ[name] for name in _MPI_JOB_NAMES if name in environ), "")
    return _FIRST_PORT + zlib.crc32(name.encode()) % _PORTS


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    try:
        return int(text or "")
    except ValueError:
        was = "is not set" if text is None else f'is "{text}", not a whole number'
        raise ClusterError(
            f"{name} {was}: start the job with horovodrun, mpirun or tfdist.launch, which set it."
        ) from None
