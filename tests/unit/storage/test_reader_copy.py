"""The copy of a run in an object store, of those who only read it."""

import json

from tests.stores.s3_server import BUCKET
from tfdist.storage.reader_copy import ReadRun

URL = f"s3://{BUCKET}/run"


def status(run_id):
    return json.dumps({"status": "finished", "run_id": run_id}).encode()


def test_flags_of_the_same_length_are_brought_anew(s3, tmp_path):
    s3.change("run/status.json", status("a"))
    for flags in (b"--steps=20\n", b"--steps=40\n"):
        s3.change("run/flags.txt", flags)
        folder = ReadRun(URL, str(tmp_path)).bring()
        assert (folder / "flags.txt").read_bytes() == flags


def test_the_copy_of_a_run_that_is_no_more_is_forgotten(s3, tmp_path):
    s3.change("run/status.json", status("a"))
    s3.change("run/logs/rank-1.jsonl", b"{}\n")
    folder = ReadRun(URL, str(tmp_path)).bring()
    (folder / "checkpoints" / "step-00000040").mkdir(parents=True)
    assert (ReadRun(URL, str(tmp_path)).bring() / "checkpoints" / "step-00000040").exists()
    s3.empty()
    assert (ReadRun(URL, str(tmp_path)).bring() / "checkpoints" / "step-00000040").exists()  # nothing says so yet
    s3.change("run/status.json", status("b"))
    ReadRun(URL, str(tmp_path)).bring()
    assert sorted(path.name for path in folder.rglob("*")) == ["status.json"]
