"""Links that somebody has put into a folder lead no writing and no removal elsewhere."""

import os
import threading

import pytest

from tfdist.control.own_files import appended_to, remove_tree, written_whole


def test_a_file_has_its_name_when_it_is_whole(tmp_path):
    path = tmp_path / "a.json"
    with written_whole(path, flushed=True) as file:
        file.write("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    with pytest.raises(KeyError), written_whole(path) as file:
        file.write("half")
        raise KeyError
    assert path.read_text() == "whole"


def test_links_lead_nowhere(tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "folder"
    (elsewhere / "inner").mkdir(parents=True)
    (elsewhere / "file").write_text("mine")
    folder.mkdir()
    temporary = folder / f".status.json.{os.getpid()}.{threading.get_ident()}.writing"
    for link in (temporary, folder / "status.json", folder / "log"):
        link.symlink_to(elsewhere / "file")
    with written_whole(folder / "status.json") as file:
        file.write("ours")
    with pytest.raises(OSError, match="symbolic"):
        appended_to(folder / "log")
    (folder / "inner").symlink_to(elsewhere)
    (tmp_path / "link").symlink_to(elsewhere)
    remove_tree(tmp_path / "link")
    remove_tree(folder)
    assert (elsewhere / "file").read_text() == "mine" and (elsewhere / "inner").is_dir() and not folder.exists()
