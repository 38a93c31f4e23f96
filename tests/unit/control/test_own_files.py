"""Links that somebody has put into a folder lead no writing and no removal elsewhere."""

import contextlib
import fcntl
import os
import threading

import pytest

from tfdist.control import own_files
from tfdist.control.own_files import (
    _not_by_a_link,
    appended_to,
    check_owner,
    flush_to_disk,
    lock,
    locked,
    remove_tree,
    replaced,
    written_whole,
)


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


def test_bytes_for_their_owner_alone_under_a_name_that_the_next_writer_takes_again(tmp_path):
    path, aside = tmp_path / "backup", tmp_path / "backup.writing"
    aside.write_text("left by a process that was killed, and longer")
    with written_whole(path, "wb", flushed=True, mode=0o600, aside=aside.name) as file:
        file.write(b"whole")
    flush_to_disk(tmp_path)
    assert path.read_bytes() == b"whole" and path.stat().st_mode & 0o777 == 0o600 and not aside.exists()
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(OSError, match="symbolic"), replaced(path) as temporary:
        temporary.unlink()
        temporary.symlink_to(tmp_path / "mine")
        with open(temporary, "w", opener=_not_by_a_link) as file:
            file.write("ours")
    assert path.read_bytes() == b"whole" and (tmp_path / "mine").read_text() == "mine"


def test_a_lock_is_one_process_s(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with lock(tmp_path / "lock", wait=True) as held, lock(tmp_path / "lock", wait=False) as second:
        assert held and not second
    with lock(tmp_path / "lock", wait=False) as held:
        assert held
    with pytest.raises(OSError, match="symbolic"):
        locked(tmp_path / "link", fcntl.LOCK_EX)
    assert not (tmp_path / "elsewhere").exists()


def let_own(monkeypatch, folder, owner=1001, user=1000, gets=1000):
    """Makes `owner` the owner of a folder in which the files of this process, one of `user`, are of `gets`."""
    stat, fstat = os.stat, os.fstat

    def owned_by(owner, status):
        return os.stat_result((*status[:4], owner, *status[5:]))

    def of(path, **how):
        return owned_by(owner, stat(path, **how)) if str(path) == str(folder) else stat(path, **how)

    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "fstat", lambda descriptor: owned_by(gets, fstat(descriptor)))
    monkeypatch.setattr(os, "stat", of)


@pytest.mark.parametrize(
    ("user", "gets", "owner", "users", "refused"),
    [
        (1000, 1000, 1000, "0 0 4294967295", False),
        (1000, 1000, 1001, "0 0 4294967295", True),
        (1000, 1000, 65534, "0 0 4294967295", True),
        (1000, 1000, 0, "0 0 4294967295", False),  # a volume of Kubernetes
        (1000, 65534, 65534, "0 0 4294967295", False),  # a network file system that gives all files one owner
        (0, 0, 1000, "0 1000 1", False),  # a container in a folder of its user
        (1000, 1000, 65534, "1000 1000 1", False),  # Apptainer, a folder of the machine's root
        (1000, 1000, 65534, "0 1 1000\n1000 0 1", False),  # Podman, which knows another root
        (1000, 1000, 1001, "0 1 1000\n1000 0 1", True),
        (1000, 1000, 65534, None, True),  # a system without namespaces
    ],
)
def test_a_folder_that_another_user_has_made_is_not_ours(user, gets, owner, users, refused, monkeypatch, tmp_path):
    """gets: the owner of a file that the user makes there. users: the system's map of the users that it knows."""
    let_own(monkeypatch, tmp_path, owner, user, gets)
    monkeypatch.setattr(own_files, "_USERS", tmp_path / "uid_map")
    if users is not None:
        (tmp_path / "uid_map").write_text(f"{users}\n")
    with pytest.raises(PermissionError, match="it belongs to another user") if refused else contextlib.nullcontext():
        check_owner(str(tmp_path))


def test_a_folder_in_which_nothing_can_be_made_is_told(tmp_path):
    with pytest.raises(FileNotFoundError):
        check_owner(str(tmp_path / "missing"))
