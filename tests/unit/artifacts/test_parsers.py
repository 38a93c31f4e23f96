"""Every parser of files, fed with what nobody wrote: the entries with their types, or the one error that it is to
raise.
"""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfdist.artifacts import restore
from tfdist.artifacts.manifest import MANIFEST, SHA, parse, sealed
from tfdist.artifacts.snapshot_folder import FolderOptions, SnapshotFolder
from tfdist.artifacts.status import read_status
from tfdist.control.exit_codes import CheckpointError, ClusterError, ConfigError
from tfdist.control.tf_config import parse_tf_config
from tfdist.telemetry.jsonl import JsonlObserver, next_attempt, read_jsonl, replay

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.just("nan")
    | st.integers(2**62, 2**200),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
GOOD = {
    "format": 1,
    "step": 7,
    "consumed": 56,
    "config_digest": "d",
    "identity": {"global_batch": 8},
    "workers": 2,
    "stream_cut": 1,
    "generators": {"python": [3, [1, 2], None], "numpy": ["MT19937", [1], 1, 0, 0.0]},
    "clock": {"seconds": 1.5, "pauses": {"evaluation": 0.5}},
    "metrics": {},
    "losses": [1.0],
    "learning_rate": 0.1,
    "files": {"state-7.index": {"bytes": 1, "sha256": "x"}, "state-7.data-00000-of-00001": {"bytes": 1, "sha256": "x"}},
}
NESTED = [
    "[" * 100_000,
    '{"a":' * 100_000,
    "9" * 5000,
    "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
]


def sealed_with(**changes) -> str:
    return sealed({**GOOD, **changes})


def test_a_good_manifest_is_read():
    assert parse(sealed(GOOD), MANIFEST, 7, restore.REQUIRED) == GOOD


@pytest.mark.slow
@QUICK
@given(st.sampled_from(sorted(GOOD)), VALUES)
def test_any_value_at_any_place_of_a_manifest(name, value):
    """Its checksum right: so it is the types that count."""
    try:
        found = parse(sealed_with(**{name: value}), MANIFEST, 7, restore.REQUIRED)
    except CheckpointError as error:
        assert "\n" not in str(error) and str(error).isprintable()
        return
    assert type(found[name]) is type(GOOD[name]) or name == "learning_rate"


@QUICK
@given(VALUES | st.sampled_from(NESTED))
def test_any_json_as_a_file(tmp_path, value):
    text = value if value in NESTED else json.dumps(value)
    with pytest.raises(CheckpointError):
        parse(text, MANIFEST, 7)
    (tmp_path / "status.json").write_text(text)
    assert set(read_status(tmp_path)) <= {"status", "run_id"}
    log = tmp_path / "rank-0.jsonl"
    log.write_text(text + "\n" + json.dumps({"v": 1, "attempt": 3, "kind": "train", "step": 1, "values": {}}) + "\n")
    assert [record["step"] for record in read_jsonl(log)] == [1] and next_attempt(log) == 4
    try:
        parse_tf_config(text)
    except ClusterError as error:
        assert "TF_CONFIG" in str(error)


@QUICK
@given(st.sampled_from(["v", "time", "attempt", "kind", "step", "values", "run_id"]), VALUES)
def test_any_value_at_any_place_of_a_log(tmp_path, name, value):
    record = {
        "v": 1,
        "time": "2026-01-01T00:00:00.000+00:00",
        "run_id": "r",
        "attempt": 0,
        "rank": 0,
        "kind": "train",
        "step": 2,
        "values": {"train/loss": 1.0},
    }
    log = tmp_path / "rank-0.jsonl"
    log.write_text(json.dumps({**record, name: value}) + "\n" + json.dumps(record) + "\n")
    assert next_attempt(log) >= 1 and replay(log, 10)


@QUICK
@given(st.sampled_from(["cluster", "task"]) | st.just(""), VALUES)
def test_any_value_in_tf_config(name, value):
    good = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    for config in (
        {**good, name: value},
        {**good, "cluster": {"worker": value}},
        {**good, "task": {"type": value, "index": value}},
        {**good, "cluster": {"worker": [value]}},
    ):
        try:
            parse_tf_config(json.dumps(config))
        except ClusterError as error:
            assert "TF_CONFIG" in str(error)


def test_two_keys_of_one_name_are_still_named():
    with pytest.raises(ClusterError, match="twice"):
        parse_tf_config('{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}, "task": {}}')


@pytest.mark.parametrize("name", ["../step-00000001/state-1.index", "/etc/passwd", "..", "", "a\\b", "a\0b"])
def test_names_stay_in_the_folder(name):
    with pytest.raises(CheckpointError, match="not a file of this folder"):
        parse(sealed_with(files={**GOOD["files"], name: {"bytes": 1, "sha256": "x"}}), MANIFEST, 7)


# -- in a folder of snapshots
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "it is not JSON, or is truncated"),
        ("[]", "it has no checksum"),
        ("{}", "it has no checksum"),
        (sealed_with().replace('"step": 7', '"step": 8'), "its checksum does not match its contents"),
    ],
)
def test_what_is_wrong_with_a_manifest_is_said(text, words):
    with pytest.raises(CheckpointError, match=words):
        parse(text, MANIFEST, 1)


@pytest.fixture
def store(tmp_path):
    made = SnapshotFolder(tmp_path / "checkpoints")
    for step in (1, 2):
        made.write(step, {"train/step": np.array(step)}, {})
    return made


def forge(store, **changes):
    """A manifest of step 2 with a right checksum."""
    path = f"{store.path(2)}/{MANIFEST}"
    with open(path) as file:
        content = json.load(file)
    content.pop("sha256")
    with open(path, "w") as file:
        file.write(sealed({**content, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {}},
        {"files": []},
        {"files": None},
        {"files": {"state-2.index": 7}},
        {"step": "2"},
        {"step": 2.5},
        {"format": True},
        {"clock": 3},
        {"losses": {}},
        {"metrics": []},
    ],
)
def test_a_manifest_of_wrong_types_is_passed_over(store, changes):
    forge(store, **changes)
    snapshot, passed_over = store.newest_valid()
    assert snapshot.step == 1 and len(passed_over) == 1 and MANIFEST in passed_over[0]


def test_an_index_that_the_manifest_does_not_name(store):
    with open(f"{store.path(2)}/{MANIFEST}") as file:
        files = json.load(file)["files"]
    forge(store, files={name: entry for name, entry in files.items() if not name.endswith(".index")})
    os.remove(f"{store.path(2)}/state-2.index")
    assert store.newest_valid()[0].step == 1


def test_an_index_that_is_none(store):
    """Its size and checksum right."""
    path = f"{store.path(2)}/state-2.index"
    with open(path, "wb") as file:
        file.write(b"nothing of TensorFlow's" * 9)
    from tfdist.artifacts.file_entry import measure

    entry = measure(path, SHA, flush=False)
    with open(f"{store.path(2)}/{MANIFEST}") as file:
        files = json.load(file)["files"]
    forge(store, files={**files, "state-2.index": entry})
    snapshot, passed_over = store.newest_valid()
    assert snapshot.step == 1 and "contains no TensorFlow checkpoint" in passed_over[0]


def test_a_link_out_of_the_folder(store, tmp_path):
    path = f"{store.path(2)}/state-2.index"
    os.rename(path, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", path)
    snapshot, passed_over = store.newest_valid()
    assert snapshot.step == 1 and "link to another place" in passed_over[0]


@pytest.mark.parametrize(
    "name",
    ["step-99999999", "step-999999999999", "step-" + "9" * 100, "step-0000000000000009", "step-９９９９９９９９"],
)
def test_a_huge_step_does_not_win_by_its_name(store, name):
    os.rename(store.path(2), f"{store.directory}/{name}")
    snapshot, passed_over = store.newest_valid()
    assert snapshot.step == 1 and len(passed_over) <= 1
    store.set_aside_damaged()
    assert store.newest_valid() == (store.verify(1), [])


def test_what_a_run_needs_is_asked_for(store):
    store = SnapshotFolder(store.directory, options=FolderOptions(required=restore.REQUIRED))
    snapshot, passed_over = store.newest_valid()
    assert snapshot is None and 'lacks "consumed"' in passed_over[0]


@pytest.mark.parametrize("name", restore.REQUIRED)
def test_a_manifest_that_lacks_what_a_run_needs_is_damaged(name):
    """Whatever its checksum says: all that a resumed run takes out of it must be there."""
    with pytest.raises(CheckpointError, match=f'damaged: it lacks "{name}"'):
        parse(sealed({key: value for key, value in GOOD.items() if key != name}), MANIFEST, 7, restore.REQUIRED)


def test_a_log_that_is_no_file_is_named(tmp_path):
    log = tmp_path / "logs" / "rank-0.jsonl"
    log.mkdir(parents=True)
    for use in (lambda: list(read_jsonl(log)), lambda: JsonlObserver(log, run_id="a", attempt=0, rank=0)):
        with pytest.raises(
            ConfigError, match=r"rank-0.jsonl cannot be used as the log of a run \(Is a directory\): fix"
        ):
            use()


def test_what_is_taken_out_of_a_manifest_is_required_of_it():
    taken = {
        name
        for module in ("run/recovery.py", "artifacts/restore.py")
        for name in re.findall(r"manifest\[\"(\w+)\"\]", Path("tfdist", module).read_text())
    }
    assert taken - {"step", "files"} <= set(restore.REQUIRED)
