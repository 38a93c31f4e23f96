"""TF_CONFIG: what is read, and one sentence for everything that is wrong."""

import json

import pytest

from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ClusterError
from tfdist.control.resolvers import resolve_cluster
from tfdist.control.tf_config import from_tf_config, parse_tf_config, worker_environment


def config(cluster, role="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})


def test_nothing_is_one_worker():
    for environ in ({}, {"TF_CONFIG": ""}, {"TF_CONFIG": "{}"}):
        cluster = resolve_cluster(environ)
        assert (cluster.rank, cluster.size, cluster.peers, cluster.is_chief) == (0, 1, (), True)
    assert parse_tf_config(None) == parse_tf_config("") == resolve_cluster({})


def test_ranks_without_a_chief():
    cluster = parse_tf_config(config({"worker": ["a:1", "b:2"]}, index=1))
    assert (cluster.rank, cluster.size, cluster.peers, cluster.address) == (1, 2, ("a:1", "b:2"), "b:2")
    assert not cluster.is_chief and parse_tf_config(config({"worker": ["a:1", "b:2"]})).is_chief
    assert json.loads(cluster.tf_config()) == {
        "cluster": {"worker": ["a:1", "b:2"]},
        "task": {"type": "worker", "index": 1},
    }
    assert "worker 1" in cluster.describe() and "rank 1 of 2" in cluster.describe()


def test_the_chief_comes_first_wherever_it_stands():
    text = config({"worker": ["a:1", "b:2"], "chief": ["c:3"]}, index=1)
    cluster = parse_tf_config(text)
    assert (cluster.rank, cluster.peers) == (2, ("c:3", "a:1", "b:2"))
    assert parse_tf_config(config({"worker": ["a:1"], "chief": ["c:3"]}, "chief")).rank == 0
    assert cluster.task(0) == "/job:chief/replica:0/task:0" and cluster.task(2) == "/job:worker/replica:0/task:1"
    assert cluster.name(0) == "chief 0 (rank 0, c:3)" and cluster.name(2) == "worker 1 (rank 2, b:2)"


def test_an_evaluator_trains_nothing_and_need_not_be_listed():
    for spec in ({"worker": ["a:1", "b:2"]}, {"worker": ["a:1", "b:2"], "evaluator": ["e:9"]}):
        cluster = parse_tf_config(config(spec, "evaluator"))
        assert (cluster.rank, cluster.size, cluster.address, cluster.is_chief) == (-1, 2, "", False)
        assert "evaluator" in cluster.describe()
    listed = parse_tf_config(config({"worker": ["a:1", "b:2"], "evaluator": ["e:9"]}))
    assert "evaluator" not in json.loads(listed.tf_config())["cluster"]


def test_parameter_servers_take_no_rank():
    spec = {"ps": ["p:1", "p:2"], "worker": ["a:1"], "chief": ["c:1"]}
    cluster = parse_tf_config(config(spec))
    assert cluster.peers == ("c:1", "a:1") and "ps" not in json.loads(cluster.tf_config())["cluster"]
    server = parse_tf_config(config(spec, "ps", 1))
    assert (server.rank, server.is_chief, server.address) == (
        -1,
        False,
        "",
    ) and "2 parameter servers" in server.describe()
    assert server.others("ps", "chief") == {"ps 0 (p:1)": "p:1", "ps 1 (p:2)": "p:2", "chief 0 (c:1)": "c:1"}


def test_a_local_job_with_parameter_servers():
    found = [
        json.loads(worker_environment(["h:1", "h:2", "h:3", "h:4"], rank, 0, {}, servers=1)["TF_CONFIG"])
        for rank in (0, 2, 3, None)
    ]
    assert [entry["task"] for entry in found] == [
        {"type": role, "index": index} for role, index in (("chief", 0), ("worker", 1), ("ps", 0), ("evaluator", 0))
    ]
    assert all(entry["cluster"] == {"chief": ["h:1"], "worker": ["h:2", "h:3"], "ps": ["h:4"]} for entry in found)


def test_other_environments_can_be_added(monkeypatch):
    monkeypatch.setattr(
        "tfdist.control.resolvers.RESOLVERS",
        [from_tf_config, lambda environ: Cluster(index=7) if "OTHER" in environ else None],
    )
    assert resolve_cluster({"OTHER": ""}).index == 7
    assert resolve_cluster({"OTHER": "", "TF_CONFIG": config({"worker": ["a:1"]})}).index == 0
    assert resolve_cluster({}) == Cluster()


def test_ipv6_addresses_are_read():
    assert parse_tf_config(config({"worker": ["[::1]:1", "[::1]:2"]}, index=1)).address == "[::1]:2"


BAD = {
    "bad JSON": ("{'cluster': 1}", ["not valid JSON", "character 1", "{'cluster'"]),
    "cut JSON": ('{"cluster": {"worker": ["a:1"', ["not valid JSON", "character 29"]),
    "key twice": ('{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}}', ["worker", "twice"]),
    "not an object": ("[1]", ["object"]),
    "an empty list": ("[]", ["object", "not list", "or unset it."]),
    "cluster no object": ('{"cluster": ["a:1"], "task": {"type": "worker", "index": 0}}', ['no "cluster"']),
    "no cluster": ('{"task": {"type": "worker", "index": 0}}', ['no "cluster"']),
    "no task": ('{"cluster": {"worker": ["a:1"]}}', ['no "task"']),
    "no type": ('{"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}', ["task.type", "missing"]),
    "no index": (
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"}}',
        ["task.index is missing", "0 to 1"],
    ),
    "parameter server": (config({"ps": ["p:1"], "worker": ["a:1"]}, "ps"), ["task.type", "no chief"]),
    "unknown type": (config({"worker": ["a:1"]}, "master"), ["task.type", "master"]),
    "unknown role": (config({"worker": ["a:1"], "boss": ["b:1"]}), ["cluster.boss", "chief"]),
    "index out of range": (config({"worker": ["a:1", "b:1"]}, index=2), ["task.index is 2", "0 to 1"]),
    "negative index": (config({"worker": ["a:1"]}, index=-1), ["task.index is -1"]),
    "index no number": (config({"worker": ["a:1"]}, index="one"), ["task.index", "one"]),
    "index a boolean": (config({"worker": ["a:1", "b:1"]}, index=True), ["task.index", "true"]),
    "index an odd digit": (config({"worker": ["a:1", "b:1"]}, index="\u00b2"), ["task.index"]),
    "index a fraction": (config({"worker": ["a:1"]}, index=0.5), ["task.index", "0.5"]),
    "duplicate": (
        config({"chief": ["a:1"], "worker": ["b:1", "a:1"]}),
        ["a:1", "cluster.chief[0]", "cluster.worker[1]"],
    ),
    "no port": (config({"worker": ["a"]}), ["cluster.worker[0]", "host:port"]),
    "bad port": (config({"worker": ["a:http"]}), ["a:http", "65535"]),
    "port zero": (config({"worker": ["a:0"]}), ["a:0", "1 to 65535"]),
    "port of odd digits": (config({"worker": ["a:\u00b2"]}), ["cluster.worker[0]"]),
    "a URL": (config({"worker": ["http://a:1"]}), ["http://a:1", "host:port"]),
    "a space": (config({"worker": ["a :1"]}), ["a :1"]),
    "bare IPv6": (config({"worker": ["fe80::1:2222"]}), ["fe80::1:2222", "[::1]"]),
    "address no text": (config({"worker": [2222]}), ["cluster.worker", "2222"]),
    "port too large": (config({"worker": ["a:70000"]}), ["a:70000"]),
    "no host": (config({"worker": [":2222"]}), [":2222"]),
    "two chiefs": (config({"chief": ["a:1", "b:1"]}, "chief"), ["2 chiefs", "cluster.worker"]),
    "no workers": (config({"evaluator": ["a:1"]}, "evaluator"), ["no chief and no worker"]),
    "addresses no list": (config({"worker": "a:1"}), ["cluster.worker", "list"]),
    "role absent": (config({"worker": ["a:1"]}, "chief"), ["cluster lists no chief"]),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_named(name):
    text, words = BAD[name]
    with pytest.raises(ClusterError) as error:
        parse_tf_config(text)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value) and "TF_CONFIG" in str(error.value)


def test_an_index_as_text_is_read():
    assert parse_tf_config(config({"worker": ["a:1", "b:1"]}, index="1")).rank == 1
