"""Horovod's variables: read from its launchers, and made from TF_CONFIG and from those of mpirun."""

import json

import pytest

from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ClusterError
from tfdist.control.horovod_env import placement
from tfdist.control.preflight import wait_for_peers
from tfdist.control.resolvers import resolve_cluster
from tfdist.control.tf_config import parse_tf_config

HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "3",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4242",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "job-1",
}


def of_addresses(*addresses, rank=0):
    return parse_tf_config(json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}))


def test_horovodrun_has_said_all_that_is_needed():
    cluster = resolve_cluster(HOROVODRUN)
    assert (cluster.rank, cluster.size, cluster.peers, cluster.started_by, cluster.name(2)) == (
        1,
        3,
        (),
        "horovodrun",
        "rank 2",
    )
    assert "rank 1 of 3 workers, started by horovodrun" in cluster.describe()
    wait_for_peers(cluster, 0.0)  # there is nobody to probe at
    place = placement(cluster, HOROVODRUN)
    assert (place.variables, place.server, place.serve, place.local_rank) == ({}, ("10.0.0.1", 4242), False, 1)


def test_tf_config_comes_first():
    text = json.dumps({"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0}})
    assert resolve_cluster({**HOROVODRUN, "TF_CONFIG": text}).peers == ("a:1", "b:2")


def test_one_process_needs_no_rendezvous():
    for cluster in (Cluster(), resolve_cluster({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"})):
        assert placement(cluster, {}).server is None


def test_ranks_on_one_machine_are_found_by_their_host():
    """a holds ranks 0, 1 and 3; b holds 2."""
    found = [placement(of_addresses("a:1", "a:2", "b:1", "a:3", rank=rank), {}) for rank in range(4)]
    assert all(place.server == ("a", 1) and place.serve for place in found)
    columns = {
        name: [place.variables[f"HOROVOD_{name}"] for place in found]
        for name in ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
    }
    assert columns == {
        "RANK": ["0", "1", "2", "3"],
        "LOCAL_RANK": ["0", "1", "0", "2"],
        "LOCAL_SIZE": ["3", "3", "1", "3"],
        "CROSS_RANK": ["0", "0", "1", "0"],
        "CROSS_SIZE": ["2", "1", "2", "1"],
        "HOSTNAME": ["a", "a", "b", "a"],
    }


def test_mpirun_on_one_machine_needs_nothing_more():
    cluster = resolve_cluster(MPIRUN)
    assert (cluster.rank, cluster.size, cluster.started_by) == (2, 4, "mpirun")
    place = placement(cluster, MPIRUN)
    assert place.server[0] == "127.0.0.1" and place.serve and place.local_rank == 2
    other = placement(cluster, {**MPIRUN, "PMIX_NAMESPACE": "job-2"})
    assert other.server[1] != place.server[1] and 20000 <= place.server[1] < 30000
    assert placement(cluster, {**MPIRUN, "HOROVOD_GLOO_RENDEZVOUS_PORT": "5555"}).server == ("127.0.0.1", 5555)


def test_mpirun_over_machines_is_told_where_rank_0_is():
    environ = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(ClusterError, match="add -x HOROVOD_GLOO_RENDEZVOUS_ADDR=HOST"):
        placement(resolve_cluster(environ), environ)
    place = placement(
        resolve_cluster(environ),
        {**environ, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "node-0", "HOROVOD_GLOO_RENDEZVOUS_PORT": "5555"},
    )
    assert place.server == ("node-0", 5555) and place.variables["HOROVOD_CROSS_SIZE"] == "4"


@pytest.mark.parametrize(
    "environ, words",
    [
        ({"HOROVOD_RANK": "3", "HOROVOD_SIZE": "3"}, "HOROVOD_RANK=3"),
        ({**HOROVODRUN, "HOROVOD_ELASTIC": "1"}, "use `python -m tfdist.launch --elastic"),
        ({"HOROVOD_RANK": "x", "HOROVOD_SIZE": "3"}, 'HOROVOD_RANK is "x"'),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "3"}, "HOROVOD_GLOO_RENDEZVOUS_ADDR is not set"),
        ({**HOROVODRUN, "HOROVOD_GLOO_RENDEZVOUS_PORT": ""}, 'HOROVOD_GLOO_RENDEZVOUS_PORT is ""'),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK is not set"),
    ],
)
def test_what_is_wrong_is_named(environ, words):
    with pytest.raises(ClusterError, match=words):
        placement(resolve_cluster(environ), environ)


def test_ipv6_is_refused_with_the_reason():
    with pytest.raises(ClusterError, match="IPv6"):
        placement(of_addresses("[::1]:1", "[::1]:2"), {})
