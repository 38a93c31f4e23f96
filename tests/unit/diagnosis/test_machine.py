"""What a machine lacks is named, with the fix."""

from importlib import metadata
from pathlib import Path

import pytest

from tfdist.control.cluster import Cluster
from tfdist.diagnosis.findings import Finding, State, fine, is_healthy, warning, wrong
from tfdist.diagnosis.folder_speed import run_folder
from tfdist.diagnosis.limits import Limits, limits
from tfdist.diagnosis.meeting import addresses
from tfdist.diagnosis.packages import packages

GOOD = Limits(cores=8, shared=2**34, memory=2**36, open_files=65536, threads={"OMP_NUM_THREADS": 8})


def of(findings, name):
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def test_a_finding_is_a_line_and_travels():
    found = wrong("/dev/shm", "64 MiB", "more")
    assert str(found) == "WRONG    /dev/shm: 64 MiB Fix: more" and Finding.from_dict(found.as_dict()) == found
    assert is_healthy([fine("a", "b"), warning("a", "b", "c")]) and not is_healthy([fine("a", "b"), found])


def test_a_good_machine():
    assert {finding.state for finding in limits(GOOD)} == {State.FINE}
    assert not [str(finding) for finding in limits(Limits.read({})) if finding.state is State.WRONG]


@pytest.mark.parametrize(
    ("name", "change", "state", "words"),
    [
        ("/dev/shm", {"shared": 64 * 2**20}, State.WRONG, ["64 MiB", "--shm-size"]),
        ("/dev/shm", {"shared": None}, State.WARNING, ["tmpfs"]),
        ("cores", {"cores": 4}, State.WARNING, ["OMP_NUM_THREADS=8", "may use 4", "set OMP_NUM_THREADS=4"]),
        ("memory", {"memory": 2**30}, State.WARNING, ["1.0 GiB"]),
        ("open files", {"open_files": 256}, State.WARNING, ["256", "ulimit -n"]),
    ],
)
def test_a_limit(name, change, state, words):
    found = of(limits(Limits(**{**vars(GOOD), **change})), name)
    assert found.state is state and all(word in str(found) for word in words), str(found)


def test_versions():
    found = packages()
    assert found.state is State.FINE and "keras" in found.what

    def older(name):
        return "2.16.1" if name.startswith("tensorflow") else metadata.version(name)

    found = packages((3, 11), older)
    assert found.state is State.WRONG and "2.16.1 is not supported" in found.what and "pip install" in found.fix


def test_a_run_folder(tmp_path):
    found = run_folder(tmp_path / "runs" / "one", 2**20)
    assert found.state is not State.WRONG and str(tmp_path) in found.what and not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    found = run_folder(tmp_path / "file", 2**20)
    assert found.state is State.WRONG and "is a file" in found.what
    found = run_folder(Path("/proc/tfdist"), 2**20)  # where nobody, not even root, can make a file
    assert found.state is State.WRONG and "--run_dir=/proc/tfdist" in found.what and "may write to" in found.fix


def test_addresses_that_mean_nothing():
    here = Cluster.of_workers(["127.0.0.1:4000", "127.0.0.1:4001"], 0)
    assert addresses(here) == []
    (found,) = addresses(Cluster.of_workers(["127.0.0.1:4000", "no-such-host.invalid:4000"], 0))
    assert found.state is State.WRONG and "worker 1 (rank 1, no-such-host.invalid:4000)" in found.what
    (found,) = addresses(Cluster.of_workers(["192.0.2.7:4000", "127.0.0.1:4000"], 0))  # of documentation: nobody's
    assert found.state is State.WARNING and "192.0.2.7:4000" in found.what
