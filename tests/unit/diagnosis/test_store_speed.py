"""What tfdist.doctor says of the object stores in its flags."""

from __future__ import annotations

import pytest

from tests.stores.s3_server import BUCKET
from tfdist.config import Config
from tfdist.diagnosis import store_speed
from tfdist.diagnosis.findings import State
from tfdist.doctor import DoctorOptions, examine
from tfdist.storage import object_store


@pytest.fixture(autouse=True)
def without_delay(monkeypatch):
    monkeypatch.setattr(store_speed, "_PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(object_store, "_REFUSED_SECONDS", 0.1)


def found(**flags) -> dict[str, str]:
    told = examine(Config().replace(**flags), DoctorOptions(arithmetic=False))
    return {each.name: str(each) for each in told.findings if each.name.endswith(" store")}


@pytest.mark.slow
def test_every_store_in_the_flags_is_tried_and_left_as_it_was(s3, tmp_path):
    s3.change("data/train", b"records")
    places = {f"{kind}_dir": f"s3://{BUCKET}/{kind}" for kind in ("run", "backup", "data")}
    said = found(**places)
    assert said["run store"].startswith(f"fine     run store: s3://{BUCKET}/run takes ")
    assert said["backup store"].startswith(f"fine     backup store: s3://{BUCKET}/backup takes ")
    assert said["data store"].startswith(f"fine     data store: s3://{BUCKET}/data contains 1 objects")
    assert s3.names() == ["data/train"]
    assert found(run_dir=str(tmp_path), backup_dir=str(tmp_path / "backup")) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "backup", "data"])
def test_a_store_that_cannot_be_used_is_named_with_its_flag(s3, through_proxy, tmp_path, kind):
    flags = {"run_dir": str(tmp_path), f"{kind}_dir": "s3://nowhere/at-all"}
    (sentence,) = found(**flags).values()
    assert sentence.startswith(f"{State.WRONG.value}    {kind} store: --{kind}_dir=s3://nowhere/at-all: ")
    assert "the bucket or folder does not exist" in sentence
    with through_proxy(lambda method, path: "403"):
        (sentence,) = found(**{**flags, f"{kind}_dir": f"s3://{BUCKET}/runs"}).values()
    assert f"--{kind}_dir=s3://{BUCKET}/runs" in sentence and "it is not permitted" in sentence


def test_data_that_are_not_there(s3, tmp_path):
    (sentence,) = found(run_dir=str(tmp_path), data_dir=f"s3://{BUCKET}/none").values()
    assert "--data_dir=s3://bucket/none contains no objects" in sentence
