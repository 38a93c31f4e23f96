"""tfdist.comm without a cluster: what sizes and bandwidths mean, the fit, tables and files, bad flags."""

import csv

import pytest

from tfdist import comm
from tfdist.communication import present
from tfdist.communication.alpha_beta import ALGORITHMS, errors, explain, fit_line, split
from tfdist.communication.measurement import BUS_FACTOR, Measurement
from tfdist.config import Config
from tfdist.control.exit_codes import TfdistError
from tfdist.planner.communication import Link

SIZES = [2**power for power in range(10, 25)]
LINK = Link(40e-6, 1.25e9)


def made(collective, members, seconds):
    return [Measurement(collective, members, size, seconds(size)) for size in SIZES]


@pytest.mark.parametrize(
    "collective, n, factor",
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_reduce", 8, 1.75),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 8, 0.875),
        ("broadcast", 8, 1.0),
    ],
)
def test_bus_bandwidth_is_what_the_slowest_link_carries(collective, n, factor):
    """The figures of nccl-tests' PERFORMANCE.md; with a bandwidth-optimal algorithm and no latency it is the link's
    own.
    """
    assert BUS_FACTOR[collective](n) == pytest.approx(factor)
    optimal = ALGORITHMS[collective]["pairwise" if collective == "all_to_all" else "ring"]
    assert Measurement(collective, n, 1 << 24, optimal(n, 1 << 24, Link(0.0, 3e9))).bus_bandwidth == pytest.approx(3e9)


def test_every_collective_has_a_bus_factor_and_algorithms():
    assert set(BUS_FACTOR) == set(ALGORITHMS) == set(comm.COLLECTIVES)


def test_fit_recovers_alpha_and_beta_and_predicts_held_out_sizes():
    found = made("all_reduce", 2, lambda size: 55e-6 + size / 0.8e9)
    fitted, held = split(found)
    assert len(held) == 7 and not set(held) & set(fitted) and {found[0], found[-1]} <= set(fitted)
    line = fit_line(fitted)
    assert (line.alpha, line.beta) == pytest.approx((55e-6, 0.8e9))
    assert errors(lambda one: line.seconds(one.size), held) == pytest.approx([0] * 7, abs=1e-6)


def test_a_knee_is_found_where_there_is_one():
    """Up to 1 MB in a cache of 4 GB/s, beyond at 2 GB/s."""
    found = made("all_reduce", 2, lambda size: 50e-6 + size / 4e9 + max(0, size - 2**20) / 4e9)
    fitted, held = split(found)
    line = fit_line(fitted)
    assert (line.alpha, line.beta, line.knee, 1 / line.beyond) == pytest.approx((50e-6, 4e9, 2**20, 4e9), rel=0.01)
    assert errors(lambda one: line.seconds(one.size), held) == pytest.approx([0] * 7, abs=0.01)
    assert "above 1,048,576 bytes 2.000 GB/s" in line.describe()


@pytest.mark.parametrize("at_work", ["ring", "tree", "halving_doubling"])
def test_the_algorithm_at_work_is_found_over_several_numbers_of_members(at_work):
    found = [
        one
        for n in (2, 4, 8)
        for one in made("all_reduce", n, lambda size, n=n: ALGORITHMS["all_reduce"][at_work](n, size, LINK))
    ]
    best, *others = explain("all_reduce", found)
    assert (
        best.algorithm == at_work
        and best.error < 1e-6
        and (best.link.alpha, best.link.beta) == pytest.approx((LINK.alpha, LINK.beta))
    )
    assert all(other.error > 0.01 for other in others)


@pytest.mark.slow
def test_files_and_table(tmp_path):
    results = [
        present.Series("mesh", "TensorFlow, gRPC", made(name, 4, lambda size: 1e-4 + size / 2e9))
        for name in ("all_reduce", "broadcast")
    ]
    results.append(
        present.Series("mesh", "TensorFlow, gRPC", made("all_to_all", 4, lambda size: 1e-4)[:2])
    )  # too few for a fit
    present.write_csv(tmp_path / "a.csv", results)
    assert present.read_csv(tmp_path / "a.csv") == results
    with open(tmp_path / "a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(SIZES) + 2 and float(rows[0]["bus_gbs"]) == pytest.approx(
        1.5 * float(rows[0]["algorithm_gbs"]), abs=1e-6
    )
    assert [row["in_fit"] for row in rows[:4]] == ["1", "0", "1", "0"] and rows[-1]["predicted_seconds"] == ""
    assert "7 of 7 sizes held out within 25 %" in present.table(results[0]) and "fit" not in present.table(results[2])
    present.draw(tmp_path / "a.png", results)
    present.draw_models(tmp_path / "models.png", results)
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "models.png"))


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--workers=1"], ["--workers=1", "from 2"]),
        (["--workers=two"], ["--workers=two", "2,4"]),
        (["--workers=2", "--runtimes=mpi"], ["--runtimes=mpi", "horovod"]),
        (["--workers=2", "--runtimes=multi_worker:fast"], ["--communication=fast", "ring"]),
        (["--workers=2", "--strategy=one_device"], ["--strategy=one_device", "mesh"]),
        (["--runtimes=mesh"], ["--runtimes=mesh", "--workers=2"]),
        (["--collectives=gather"], ["--collectives=gather", "all_gather"]),
        (["--smallest=4096", "--largest=1024"], ["--smallest=4096", "--largest=1024"]),
        (["--factor=1"], ["--factor=1", "1.1"]),
        (["--repeats=0"], ["--repeats=0", "at least 1"]),
        (["--workers=2", "--out=/dev/null/x"], ["--out=/dev/null/x", "choose a folder"]),
        ([], ["TF_CONFIG", "--workers=2"]),
    ],
)
def test_bad_flags_get_one_sentence(argv, words, tmp_path, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(TfdistError) as error:
        comm.main([f"--out={tmp_path}", *argv])
    assert all(word in str(error.value) for word in words), error.value


def test_a_runtime_with_the_default_communication_has_one_label():
    """Its workers, which get the flags, write files of this name."""
    options = comm.CommOptions(workers="2", runtimes="multi_worker:auto,sockets,multi_worker:ring")
    assert [label for label, _ in comm.runtimes_of(Config(), options)] == [
        "multi_worker",
        "sockets",
        "multi_worker:ring",
    ]


def test_sizes_are_a_geometric_series():
    assert comm.sizes_of(comm.CommOptions(smallest=1024, largest=8192)) == [1024, 2048, 4096, 8192]
    assert comm.sizes_of(comm.CommOptions(smallest=1000, largest=1100, factor=1.1)) == [1000, 1100]
