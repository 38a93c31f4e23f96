"""Slurm's and Kubernetes' variables: which cluster they make, and when they say nothing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.control.exit_codes import ClusterError
from tfdist.control.resolvers import cluster_to_join, resolve_cluster
from tfdist.control.slurm import expand_counts, expand_hostlist

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
    "SLURM_NODELIST": "gpu[08-09]",
    "SLURMD_NODENAME": "gpu09",
}
# What a shell of `salloc`, or a batch script, has.
ALLOCATION = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_NODELIST": "gpu[08-09]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
}
POD = {"JOB_COMPLETION_INDEX": "1", "TFDIST_WORKERS": "3", "TFDIST_ADDRESS": "run-{index}.run:2222"}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", "login"),
        ("a,b", "a b"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[001-003,07]", "n001 n002 n003 n07"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[08-10]", "n08 n09 n10"),
        ("gpu[08-10,3],a[1-2]b[1-2],login", "gpu08 gpu09 gpu10 gpu3 a1b1 a1b2 a2b1 a2b2 login"),
        ("r[1,3]-n[2]", "r1-n2 r3-n2"),
        ("n[1-2].dc.example", "n1.dc.example n2.dc.example"),
        ("tux-[5]", "tux-5"),
        ("a[1]b", "a1b"),
    ],
)
def test_host_lists(text, hosts):
    assert expand_hostlist(text) == hosts.split()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n[",
        "n[1-",
        "n[1-2",
        "n]1[",
        "n[2-1]",
        "n[a-b]",
        "a,,b",
        ",a",
        "a,",
        "n[1-2]]",
        "n[[1]]",
        "a b",
        "n[]",
        "n[1;2]",
    ],
)
def test_bad_host_lists(text):
    with pytest.raises(ClusterError, match="TF_CONFIG"):
        expand_hostlist(text)


@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z]([a-z-]*[a-z])?", fullmatch=True),
            st.integers(0, 50),
            st.integers(0, 20),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_ranges_come_back(ranges):
    text = ",".join(f"{name}[{first:0{width}d}-{first + more:0{width}d}]" for name, first, more, width in ranges)
    assert expand_hostlist(text) == [
        f"{name}{number:0{width}d}" for name, first, more, width in ranges for number in range(first, first + more + 1)
    ]


def test_counts():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1] and expand_counts("4") == [4]
    for bad in ("", "2(x", "a", "2,,1", "-1"):
        with pytest.raises(ClusterError):
            expand_counts(bad)


def test_a_step_of_several_tasks_is_a_cluster():
    cluster = resolve_cluster(STEP)
    assert (cluster.role, cluster.rank, cluster.size) == ("worker", 2, 4)
    assert [address.partition(":")[0] for address in cluster.peers] == ["gpu08", "gpu08", "gpu09", "gpu09"]
    ports = [int(address.partition(":")[2]) for address in cluster.peers]
    assert len(set(ports)) == 4 and all(1024 < port < 32768 for port in ports)
    assert json.loads(cluster.tf_config())["cluster"]["worker"] == list(cluster.peers) and cluster.name(2).startswith(
        "worker 2 (rank 2, gpu09:"
    )
    # All tasks say the same; another job and another step say other ports.
    others = [
        resolve_cluster({**STEP, "SLURM_PROCID": str(rank), "SLURMD_NODENAME": host})
        for rank, host in enumerate(("gpu08", "gpu08", "gpu09", "gpu09"))
    ]
    assert {other.peers for other in others} == {cluster.peers} and [other.rank for other in others] == [0, 1, 2, 3]
    assert not set(resolve_cluster({**STEP, "SLURM_JOB_ID": "8"}).peers) & set(cluster.peers) and not set(
        resolve_cluster({**STEP, "SLURM_STEP_ID": "1"}).peers
    ) & set(cluster.peers)
    assert resolve_cluster({**STEP, "TFDIST_PORT": "5000"}).peers[3] == "gpu09:5003"


def test_uneven_and_cyclic_steps():
    uneven = {**STEP, "SLURM_STEP_NODELIST": "a,b[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)"}
    assert [address.partition(":")[0] for address in resolve_cluster({**uneven, "SLURMD_NODENAME": "b1"}).peers] == [
        "a",
        "a",
        "b1",
        "b2",
    ]
    cyclic = resolve_cluster({**uneven, "SLURM_DISTRIBUTION": "cyclic", "SLURMD_NODENAME": "b2"})
    assert [address.partition(":")[0] for address in cyclic.peers] == ["a", "b1", "b2", "a"]


def test_outside_of_a_step_a_process_is_alone():
    for environ in (ALLOCATION, {**STEP, "SLURM_STEP_NUM_TASKS": "1"}, {**ALLOCATION, "SLURM_STEP_ID": "4294967290"}):
        assert resolve_cluster(environ).size == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURMD_NODENAME": "gpu08"}, ["SLURM_PROCID=2", "gpu08", "--distribution=block"]),
        ({"SLURM_DISTRIBUTION": "plane=2"}, ["plane=2", "block"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, ["contradict"]),
        ({"SLURM_PROCID": "4"}, ["contradict"]),
        ({"SLURM_STEP_NODELIST": "gpu[8"}, ["gpu[8"]),
        ({"SLURM_PROCID": "two"}, ["SLURM_PROCID=two"]),
        ({"TFDIST_PORT": "70000"}, ["TFDIST_PORT=70000", "at most 655"]),
    ],
)
def test_contradictions_are_named(changes, words):
    with pytest.raises(ClusterError) as error:
        resolve_cluster({**STEP, **changes})
    assert all(word in str(error.value) for word in words), error.value


def test_a_pod_of_an_indexed_job():
    cluster = resolve_cluster(POD)
    assert (cluster.rank, cluster.peers) == (1, ("run-0.run:2222", "run-1.run:2222", "run-2.run:2222"))


def test_other_pods_are_alone():
    assert resolve_cluster({**POD, "TFDIST_WORKERS": "1"}).size == 1
    assert resolve_cluster({"JOB_COMPLETION_INDEX": "1"}).size == 1


@pytest.mark.parametrize("missing", POD)
def test_a_pod_with_a_part_of_its_variables_does_not_train_alone(missing):
    with pytest.raises(ClusterError, match=f"is set, but {missing} is not: set all of"):
        resolve_cluster({name: value for name, value in POD.items() if name != missing})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"TFDIST_ADDRESS": "run:2222"}, ["{index}"]),
        ({"JOB_COMPLETION_INDEX": "3"}, ["JOB_COMPLETION_INDEX=3", "TFDIST_WORKERS=3"]),
        ({"TFDIST_WORKERS": "many"}, ["many"]),
        ({"TFDIST_ADDRESS": "run-{index}"}, ["TFDIST_ADDRESS", '"run-1"', "host:port"]),
    ],
)
def test_mistakes_in_a_pod_are_named(changes, words):
    with pytest.raises(ClusterError) as error:
        resolve_cluster({**POD, **changes})
    assert all(word in str(error.value) for word in words), error.value


def test_tf_config_goes_first():
    text = json.dumps({"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0}})
    assert resolve_cluster({**STEP, **POD, "TF_CONFIG": text}).peers == ("a:1", "b:2")


OTHERS = {
    "mpiexec": ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "PMI_RANK=1 and PMI_SIZE=4 say that mpiexec"),
    "torchrun": ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=0 and WORLD_SIZE=2 say that torchrun"),
}


@pytest.mark.parametrize(("environment", "words"), OTHERS.values(), ids=OTHERS)
def test_a_launcher_that_tells_no_addresses_does_not_make_each_process_train_alone(environment, words):
    with pytest.raises(ClusterError, match=f"{words}.*set TF_CONFIG.*TFDIST_WORKERS=1"):
        cluster_to_join(environment)
    assert resolve_cluster(environment).size == 1  # for what joins nobody
    text = json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
    for known in (STEP, POD, {"TF_CONFIG": text}, {"TFDIST_WORKERS": "1"}):
        assert cluster_to_join({**environment, **known}) == resolve_cluster(known)


def test_a_launcher_of_one_process_is_no_matter():
    for environment in ({}, {"PMI_RANK": "0", "PMI_SIZE": "1"}, {"RANK": "0"}, {"RANK": "?", "WORLD_SIZE": "many"}):
        assert cluster_to_join(environment).size == 1
