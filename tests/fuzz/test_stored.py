"""Cases of the fuzzer that go on from an object store: whole snapshots, divided ones, and the backup of a fit; and
those whose data are in one.
"""

from __future__ import annotations

import json

import pytest

from tests.fuzz import resume_space, space, stored_data, stores
from tests.fuzz.fleet import judge_all
from tests.fuzz.pool import Pool

_DATA = {"size": 20, "source": "arrays", "weights": "none"}
_ROWS = {"inputs": "rows", "blocks": ["dense"], "head": "classes"}
_OPTIONS = {"accumulation": 1, "global_batch": 6, "learning_rate": 0.1, "optimizer": "momentum"}
_TRAIN = {"kind": "train", "seed": 5, "model": _ROWS, "data": _DATA, "calls": [1, 1], "evaluate": False}
_OF_MESH, _OF_RING = {**_OPTIONS, "zero": 3, "shuffle": False}, _OPTIONS
SNAPSHOTS = [
    {**_TRAIN, "runtime": runtime, "options": options, "resumed": True, "stored": True, "data_in_store": how}
    for runtime, options, how in (("mesh:2", _OF_MESH, "stream"), ("multi_worker:2", _OF_RING, "ranges"))
]
# Resumed where each worker is in the middle of its own file.
BY_FILE = {
    **_TRAIN,
    "seed": 6,  # of two files
    "runtime": "mirrored:2",
    "options": {**_OPTIONS, "shuffle": False},
    "resumed": True,
    "data_in_store": "by_file",
}
BACKUP = {
    **{"kind": "fit", "seed": 5, "runtime": "fit:2", "model": _ROWS, "data": _DATA, "stored": True},
    "compile": {"learning_rate": 0.1, "loss": "entropy", "metrics": [], "optimizer": "momentum"},
    "fit": {"backup": 2, "batch_size": 8, "epochs": 3},
}
IN_STORE = [
    {
        **_TRAIN,
        "runtime": "one_device",
        "options": {**_OPTIONS, "shuffle": False},
        "resumed": True,
        "data_in_store": how,
    }
    for how in ("ranges", "stream")
]
IN_STORE_OF_MANY = [
    {**case, "runtime": "sockets:2", "data_in_store": how, "again": [{**_DATA, "size": 13, "draw": 1}]}
    for how in stored_data.KINDS
    for case in [{name: value for name, value in IN_STORE[0].items() if name != "resumed"}]
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        [*SNAPSHOTS, BY_FILE],
        pytest.param(IN_STORE, marks=pytest.mark.thorough),
        pytest.param(IN_STORE_OF_MANY, marks=pytest.mark.thorough),
        pytest.param([BACKUP], marks=pytest.mark.thorough),
    ],
    ids=["snapshots", "data", "data of many", "backup"],
)
def test_what_is_gone_on_with_from_a_store_is_as_uninterrupted_and_as_plain_keras(cases, s3, monkeypatch):
    monkeypatch.setattr(stores, "_environment", s3.environment())
    assert not any(space.conflicts(part) for case in cases for part in space.parts(case))
    pool = Pool()
    try:
        pool.start({case["runtime"] for case in cases})
        verdicts = list(judge_all(cases, pool))
    finally:
        pool.close()
    wrong = [f"{verdict.problems} --replay='{json.dumps(verdict.case)}'" for verdict in verdicts if verdict.bad]
    assert not wrong, "\n".join(wrong)
    assert not any(verdict.refused for verdict in verdicts)


def test_the_case_by_file_has_files_for_each_worker():
    assert "option:own_files" in space.features(BY_FILE)


def test_what_is_stored_is_drawn_apart():
    """So that a seed draws all else as it did, and what is stored has something to go on from it."""
    drawn = [(space.draw_stored(3, number, ["sockets:2"]), number) for number in range(400)]
    stored = [case for case, _ in drawn if "stored" in case]
    assert stored and all("option:stored" in space.features(case) for case in stored)
    assert all({"resumed", *resume_space.KEYS} & set(case) for case in stored)
    data = [case for case, _ in drawn if "data_in_store" in case]
    assert {case["data_in_store"] for case in data} == set(stored_data.KINDS)
    told = {"copies": set(), "ranges": {"option:nocache_data"}, "stream": {"option:stored_stream"}}
    told["by_file"] = set()
    for case in data:
        assert {"option:data_in_store", *told[case["data_in_store"]]} <= set(space.features(case))
    for case, number in drawn:
        case.pop("stored", None)
        case.pop("data_in_store", None)
        assert case == space.draw(3, number, ["sockets:2"])
