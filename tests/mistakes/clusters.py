"""Mistakes in TF_CONFIG, in what job systems set, in ports, and between the workers of a job."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from tests.mistakes.mistake import ANY, CLUSTER, CONFIG, DATA, STARTUP, Mistake, Process, one
from tests.mistakes.modules import DATA as DATA_SOURCE
from tests.mistakes.modules import MINE, TRAIN

SHORT = (*TRAIN, "--startup_timeout=1")
VALID = {"cluster": {"worker": ["127.0.0.1:{port0}", "127.0.0.1:{port1}"]}, "task": {"type": "worker", "index": 0}}
OTHER_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    7,
    1.5,
    1e308,
    "",
    "x",
    "0",
    "00",
    "worker",
    "chief",
    "ps",
    "127.0.0.1",
    "127.0.0.1:0",
    "host:99999",
    ":2222",
    "a b:1",
    "-1",
    "１",
    "[::1]:1",
    "::1",
    "http://a:1",
    "a:1/x",
    "a:b",
    "a:+5",
    "\x1b[31m:1",
    "💥:1",
    "a" * 300 + ":1",
    "localhost:{port0}",
    [],
    {},
    [[]],
    [1],
    {"a": 1},
    ["127.0.0.1:{port0}"],
    ["a:1", "a:1"],
)


def _at_random(document: Any, chance: random.Random) -> Any:
    """Returns a JSON document with one change somewhere."""
    document = copy.deepcopy(document)
    places: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        for key in list(part) if isinstance(part, dict) else range(len(part)):
            places.append((part, key))
            if isinstance(part[key], dict | list):
                walk(part[key])

    walk(document)
    part, key = chance.choice(places)
    how = chance.choice(["value", "value", "gone", "name", "twice"])
    if how == "gone":
        del part[key]
    elif how == "name" and isinstance(part, dict):
        part[chance.choice([key + "s", key.upper(), key[:-1], "ps", "evaluator", "chief", "Worker", ""])] = part.pop(
            key
        )
    elif how == "twice" and isinstance(part, list):
        part.append(part[key])
    else:
        part[key] = chance.choice(OTHER_VALUES)
    return document


def tf_config(chance: random.Random) -> Mistake:
    if chance.random() < 0.5:
        return _told("TF_CONFIG: another value", json.dumps(_at_random(VALID, chance)), ANY)
    good = json.dumps(VALID)
    at = chance.randrange(1, len(good) - 1)
    broken = chance.choice(
        [
            good[:at],
            good[:at] + chance.choice('{}[],:"x\\') + good[at:],
            good.replace('"', "'"),
            good + "}",
            "\ufeff" + good,
            good[1:],
            "[" * 100_000,
            good[:at] + good[at + 1 :],
            "worker",
            "[]",
            "null",
            "3",
            '""',
            "[" + good + "]",
            " ",
            '{"cluster": {}}',
            "NaN",
            good.replace("0}", "1e9}"),
            good.replace("worker", "wörker"),
            "true",
            "{,}",
        ]
    )
    return _told("TF_CONFIG: not JSON", broken, ANY)


def _told(kind: str, text: str, codes: frozenset[int], *words: str) -> Mistake:
    return one(kind, SHORT, codes, *words, environment={"TF_CONFIG": text})


# changes of `VALID` that are never valid -> a word of the sentence
SURELY_WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"task": {"type": "worker", "index": 2}}, "task.index"),
    ({"task": {"type": "worker", "index": -1}}, "task.index"),
    ({"task": {"type": "worker", "index": "zero"}}, "task.index"),
    ({"task": {"type": "worker"}}, "task.index"),
    ({"task": {"type": "work", "index": 0}}, "task.type"),
    ({"task": {"index": 0}}, "task.type"),
    ({"task": None}, "task"),
    ({"task": []}, "task"),
    ({"task": {"type": "ps", "index": 0}}, "ps"),
    ({"task": {"type": "chief", "index": 0}}, "chief"),
    ({"task": {"type": "worker", "index": 1.0}}, "task.index"),
    ({"task": {"type": "worker", "index": True}}, "task.index"),
    ({"task": {"type": ["worker"], "index": 0}}, "task.type"),
    ({"task": "worker"}, "task"),
    ({"cluster": {"worker": ["127.0.0.1:{port0}", "127.0.0.1:{port0}"]}}, "cluster.worker[1]"),
    ({"cluster": {"worker": ["127.0.0.1"]}}, "cluster.worker[0]"),
    ({"cluster": {"worker": "127.0.0.1:1"}}, "cluster.worker"),
    ({"cluster": {}}, "cluster"),
    ({"cluster": {"worker": [1, 2]}}, "cluster.worker"),
    ({"cluster": {"workers": ["a:1"]}}, "cluster.workers"),
    ({"cluster": {"worker": []}}, "cluster"),
    ({"cluster": {"chief": ["a:1", "b:1"], "worker": ["c:1"]}}, "chief"),
    ({"cluster": [["a:1"]]}, "cluster"),
    ({"cluster": {"worker": ["127.0.0.1:70000", "b:1"]}}, "70000"),
    ({"cluster": {"worker": ["127.0.0.1:-1", "b:1"]}}, "-1"),
    ({"cluster": {"worker": ["worker-0:port", "b:1"]}}, "port"),
    ({"cluster": {"worker": ["::1:2222", "b:1"]}}, "::1"),
    ({"cluster": {"worker": ["", "b:1"]}}, "cluster.worker[0]"),
    ({"cluster": {"worker": ["http://a:1", "b:1"]}}, "http://a"),
    ({"cluster": {"worker": [None, "b:1"]}}, "cluster.worker"),
    ({"cluster": {"worker": {"0": "a:1"}}}, "cluster.worker"),
)


def surely_wrong(chance: random.Random) -> Mistake:
    changes, word = chance.choice(SURELY_WRONG)
    return _told("TF_CONFIG: surely wrong", json.dumps({**VALID, **changes}), CLUSTER, word)


def peers(chance: random.Random) -> Mistake:
    """One of the addresses is well-formed, but wrong on this machine or network."""
    how = chance.choice(["absent", "name", "busy", "other's", "short"])
    if how == "absent":
        return _told("TF_CONFIG: a peer that does not come", json.dumps(VALID), STARTUP, "worker 1")
    if how == "name":
        wrong = {**VALID, "cluster": {"worker": ["127.0.0.1:{port0}", "no-such-host.invalid:{port1}"]}}
        return _told("TF_CONFIG: a host that is not there", json.dumps(wrong), STARTUP, "no-such-host.invalid")
    if how == "busy":
        wrong = {**VALID, "cluster": {"worker": ["127.0.0.1:{busy}", "127.0.0.1:{port1}"]}}
        return _told("TF_CONFIG: a port in use", json.dumps(wrong), STARTUP, "is in use on this machine")
    if how == "other's":
        wrong = {**VALID, "cluster": {"worker": ["192.0.2.1:{port0}", "127.0.0.1:{port1}"]}}  # nobody has this address
        return _told("TF_CONFIG: another machine's address", json.dumps(wrong), STARTUP, "192.0.2.1", "worker 1")
    alone = {"cluster": {"worker": ["127.0.0.1:{busy}"]}, "task": {"type": "worker", "index": 0}}
    return _told("TF_CONFIG: a port in use by one worker", json.dumps(alone), ANY)


SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NODELIST": "127.0.0.1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_ID": "0",
}
KUBERNETES = {"TFDIST_WORKERS": "2", "JOB_COMPLETION_INDEX": "0", "TFDIST_ADDRESS": "worker-{index}.invalid:2222"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
HOROVOD = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0"}
STRANGE = (
    "",
    "x",
    "-1",
    "99",
    "1.5",
    "2",
    "0",
    "a[1-",
    "a[3-1]",
    "2(x",
    "a[1-2]",
    "127.0.0.1",
    "{index}",
    "a b",
    "9" * 30,
    "\x1b[31m",
    "host:port",
    "１",
)


def engine(chance: random.Random) -> Mistake:
    variables = dict(chance.choice([SLURM, KUBERNETES, OPEN_MPI, HOROVOD]))
    for name in chance.sample(sorted(variables), chance.choice([1, 1, 2])):
        if chance.random() < 0.3:
            del variables[name]
        else:
            variables[name] = chance.choice(STRANGE)
    return one("environment: of a job system", SHORT, ANY, environment=variables)


OTHERS: tuple[tuple[dict[str, str], frozenset[int], str], ...] = (
    ({"TFDIST_JOB_TOKEN": "short"}, CONFIG, "TFDIST_JOB_TOKEN"),
    ({"TFDIST_JOB_TOKEN": " " * 40}, ANY, ""),
    ({"TFDIST_FAULTS": "kill"}, CONFIG, "TFDIST_FAULTS"),
    ({"TFDIST_FAULTS": "0:1:explode"}, CONFIG, "explode"),
    ({"TFDIST_FAULTS": "0:-1:kill"}, CONFIG, "TFDIST_FAULTS"),
    ({"TFDIST_FAULTS": "0:1:error"}, frozenset({1}), ""),
    ({"HOROVOD_ELASTIC": "1"}, CLUSTER, "HOROVOD_ELASTIC"),
    ({"TFDIST_PORT": "x", **SLURM}, CLUSTER, "TFDIST_PORT"),
    ({"TFDIST_PORT": "70000", **SLURM}, CLUSTER | STARTUP, "7000"),
    ({"CUDA_VISIBLE_DEVICES": "x,y"}, ANY, ""),
    ({"OMP_NUM_THREADS": "many"}, ANY, ""),
    ({"TF_NUM_INTRAOP_THREADS": "-4"}, ANY, ""),
    ({"LC_ALL": "xx"}, ANY, ""),
    ({"TERM": "\x1b"}, ANY, ""),
    ({"COLUMNS": "-3"}, ANY, ""),
    ({"TZ": "Nowhere"}, ANY, ""),
    ({"HOME": "/nowhere"}, ANY, ""),
    ({"TMPDIR": "/nowhere"}, ANY, ""),
    ({"KERAS_BACKEND": "torch"}, ANY, ""),
    ({"OTEL_TRACES_EXPORTER": "x"}, ANY, ""),
    (
        {"JOB_COMPLETION_INDEX": "2", "TFDIST_WORKERS": "2", "TFDIST_ADDRESS": "a-{index}:1"},
        CLUSTER,
        "JOB_COMPLETION_INDEX",
    ),
    ({**KUBERNETES, "TFDIST_ADDRESS": "a:1"}, CLUSTER, "TFDIST_ADDRESS"),
    ({**KUBERNETES, "TFDIST_ADDRESS": "a-{index}"}, CLUSTER, "TFDIST_ADDRESS"),
)


def environment(chance: random.Random) -> Mistake:
    variables, codes, word = chance.choice(OTHERS)
    return one("environment: of tfdist and others", SHORT, codes, word, environment=variables)


# Variables of an object store -> the one that must be named.
OF_A_STORE = (
    ({"AWS_PROFILE": "nosuch"}, "AWS_PROFILE"),
    ({"AWS_ENDPOINT_URL": "nowhere"}, "AWS_ENDPOINT_URL"),
    ({"AWS_ENDPOINT_URL": "nowhere:9000"}, "AWS_ENDPOINT_URL"),
    ({"AWS_ENDPOINT_URL": "http://me:secret@127.0.0.1:1"}, "AWS_ENDPOINT_URL"),
)


def of_a_store(chance: random.Random) -> Mistake:
    variables, word = chance.choice(OF_A_STORE)
    place = chance.choice([["--run_dir=s3://bucket/run"], ["--backup_dir=s3://bucket/b", "--backup_every=1"]])
    credentials = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_REGION": "us-east-1"}
    return one(
        "environment: of an object store", [*SHORT, *place], CONFIG, word, environment={**credentials, **variables}
    )


def _pair(kind: str, flags: list[tuple[str, ...]], codes: frozenset[int], *words: str, **fields: Any) -> Mistake:
    strategy = ("--strategy=sockets", "--startup_timeout=20", "--heartbeat_timeout=5")
    processes = [
        Process(
            (*TRAIN, *strategy, *more), {"TF_CONFIG": json.dumps({**VALID, "task": {"type": "worker", "index": rank}})}
        )
        for rank, more in enumerate(flags)
    ]
    return Mistake(kind, tuple(processes), codes, words, **fields)


OF_ONE_RANK = {
    "fails": '    if rank == 1:\n        raise OSError("the disk is gone")\n',
    "other data": "    x = x + rank\n",
    "less data": "    x, y = x[:len(x) - rank], y[:len(y) - rank]\n",
    "another order": "    x = x[::1 - 2 * rank]\n",
    "ends": "    if rank == 1:\n        raise SystemExit(3)\n",
    "no data": "    if rank == 1:\n        x, y = x[:0], y[:0]\n",
    "other type": '    x = x.astype("float64") if rank else x\n',
    "other width": "    x = x[:, :6 - rank]\n",
    "another class": "    y = y + rank\n",
}


def between_workers(chance: random.Random) -> Mistake:
    how = chance.choice(["flags", "flags", "data", "data", "data", "index", "cluster"])
    if how == "flags":
        flag = chance.choice(
            [
                "--seed=5",
                "--learning_rate=0.5",
                "--global_batch=10",
                "--model_args=widths=(9,)",
                "--optimizer=sgd",
                "--steps=4",
                "--schedule=cosine",
                "--precision=bfloat16",
            ]
        )
        return _pair(
            "workers: different flags",
            [(), (flag,)],
            CONFIG,
            "Rank 1",
        )
    if how == "data":
        kind = chance.choice(list(OF_ONE_RANK))
        changed = DATA_SOURCE.replace(
            "    return x, y",
            '    import json, os\n    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]\n'
            + OF_ONE_RANK[kind]
            + "    return x, y",
        )
        return _pair(
            f"workers: data of one {kind}",
            [(), ()],
            CONFIG | DATA,
            "ank 1" if kind not in ("no data", "fails", "ends") else "mine:data",
            files={"mine.py": MINE.replace(DATA_SOURCE, changed)},
        )
    told = (
        {**VALID, "task": {"type": "worker", "index": 0}}
        if how == "index"
        else {
            "cluster": {"worker": [*VALID["cluster"]["worker"], "127.0.0.1:{port2}"]},
            "task": {"type": "worker", "index": 1},
        }
    )
    good = _pair("", [(), ()], STARTUP)
    short = [Process((*process.arguments, "--startup_timeout=3"), process.environment) for process in good.processes]
    return Mistake(
        "workers: the same index twice" if how == "index" else "workers: different clusters",
        (short[0], Process(short[1].arguments, {"TF_CONFIG": json.dumps(told)})),
        STARTUP | CLUSTER | CONFIG,
        ("",),
    )
