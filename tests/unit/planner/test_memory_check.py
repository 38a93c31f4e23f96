"""The check before a run starts: what it counts, what it says, what it lets through."""

import resource
import subprocess
import sys

import pytest

from tests.e2e.job import ENVIRONMENT
from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ExitCode, MemoryShortError
from tfdist.planner import memory_check
from tfdist.planner.layout import Layout
from tfdist.planner.memory_check import MemoryLimit, MemoryLimits, check, least_states
from tfdist.planner.shapes import Weight

P = 1_000_000
WEIGHTS = [(Weight("kernel", (500, 1000)), 2)]
BASE = Config().replace(steps=1, global_batch=8, optimizer="adamw", strategy="mesh")


@pytest.mark.slow
@pytest.mark.parametrize(
    "zero, accumulation, expected",
    [
        (0, 1, 16 * P),
        (1, 1, 4 * P + 4 * P / 4 + 12 * P / 4),
        (1, 2, 8 * P + 12 * P / 4),
        (2, 1, 4 * P + 4 * P / 4 + 12 * P / 4),
        (3, 2, 16 * P / 4),
    ],
)
def test_what_is_certain_is_zeros_table(zero, accumulation, expected):
    config = BASE.replace(zero=zero, accumulation=accumulation)
    assert least_states(config, Layout(data=4, zero=zero), WEIGHTS).total == expected


def test_stages_and_parts_divide():
    assert least_states(BASE, Layout(pipe=2), WEIGHTS).total == 8 * P
    assert (
        least_states(
            BASE, Layout(model=2), [(Weight("kernel", (500, 1000), "model"), 1), (Weight("bias", (500_000,)), 1)]
        ).total
        == 16 * P * 0.75
    )


def test_smaller_types_and_slices_of_tables_need_less():
    halves = [(Weight("kernel", (500, 1000), element_bytes=2), 1)]
    assert least_states(BASE, Layout(), halves).total == 16 * P / 4
    tables = [(Weight("embedding/embeddings", (500, 1000)), 1), (Weight("kernel", (500, 1000)), 1)]
    assert least_states(BASE.replace(optimizer="sgd"), Layout(), tables).total == 4 * P + 4 * P / 2
    assert least_states(BASE, Layout(), tables).total == 16 * P


def refuse(config, layout, limit, **options):
    limits = (MemoryLimit(limit, "the memory limit of its cgroup", **options),)
    with pytest.raises(MemoryShortError) as error:
        check(config, layout, WEIGHTS, MemoryLimits(limits, limits))
    return str(error.value)


def test_what_fits_passes_and_what_does_not_is_told_with_the_cure():
    layout, limits = Layout(data=4), lambda limit, **more: MemoryLimits(*[(MemoryLimit(limit, "it", **more),)] * 2)
    check(BASE, layout, WEIGHTS, limits(16e6))
    check(BASE, layout, WEIGHTS, limits(20e6, in_use=4e6))
    check(BASE, layout, WEIGHTS, limits(32e6, sharers=2))
    said = refuse(BASE, layout, 15.9e6)
    assert all(
        word in said
        for word in (
            "1,000,000 parameters",
            "16 MB",
            "--optimizer=adamw",
            "--zero=0",
            "cgroup gives 15.9 MB",
            "use --zero=1, with which these take 8 MB",
        )
    ), said
    assert "use --zero=3, with which these take 4 MB" in refuse(BASE, layout, 7.9e6)
    assert "use --zero=3 on at least 6 workers" in refuse(BASE, layout, 3e6)
    assert "beside 14 MB in use already" in refuse(BASE, layout, 20e6, in_use=14e6)
    assert "on at least 2 workers" in refuse(BASE, Layout(), 10e6) and "for 2 workers" in refuse(
        BASE, layout, 20e6, sharers=2
    )
    assert "use --strategy=mesh --zero=1" in refuse(BASE.replace(strategy="multi_worker"), layout, 15e6)
    assert "an optimizer that --zero can shard" in refuse(BASE.replace(optimizer="lamb"), layout, 15e6)


def test_what_is_offloaded_counts_in_host_memory():
    config, layout = BASE.replace(zero=1, offload="optimizer"), Layout(data=2, zero=1)
    device, host = (MemoryLimit(6.1e6, "the GPU's memory"),), (MemoryLimit(6.1e6, "the machine's memory"),)
    check(config, layout, WEIGHTS, MemoryLimits(device, host))
    with pytest.raises(MemoryShortError, match="the optimizer state of .* but the machine's memory"):
        check(config, layout, WEIGHTS, MemoryLimits(device, (MemoryLimit(5.9e6, "the machine's memory"),)))
    with pytest.raises(MemoryShortError, match="the parameters and gradients of .* but the GPU's memory"):
        check(config, layout, WEIGHTS, MemoryLimits((MemoryLimit(5.9e6, "the GPU's memory"),), host))


def test_limits_are_found():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (123 << 30, before[1]))
        limits = memory_check.host_limits(Cluster(peers=("a:1", "b:1", "a:2"), size=3), in_use=5.0)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert (limits[0].size, limits[0].in_use) == (123 << 30, 5.0) and "ulimit -d" in limits[0].source
    assert limits[-1].sharers == 2 and limits[-1].size > 1e8  # the machine itself
    assert 1e6 < memory_check.anonymous_bytes() < limits[-1].size


@pytest.mark.parametrize(
    "name, text, swap, limit",
    [
        ("memory.max", "max\n", "0\n", float("inf")),
        ("memory.max", "1000\n", "max\n", 1500),
        ("memory.max", "1000\n", "100\n", 1100),
        ("memory.limit_in_bytes", "1000\n", None, 1500),
    ],
)
def test_limits_of_cgroups(tmp_path, name, text, swap, limit):
    (tmp_path / name).write_text(text)
    if swap:
        (tmp_path / "memory.swap.max").write_text(swap)
    assert memory_check._cgroup_limit(tmp_path / name, 500.0) == limit


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_a_model_that_has_a_formula_is_refused_before_anything_is_imported(tmp_path):
    """gpt2-medium needs 5 GB; imports of TensorFlow would show in the list of modules."""
    code = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
from tfdist import train
try:
    flags = ["--source=text", "--objective=next_token", "--global_batch=1", "--steps=1"]
    train.main(["--model=transformer", f"--model_args=size={sys.argv[1]}", "--source_args=nothing=1", *flags])
except ValueError as error:
    print(error.exit_code.value, error, "tensorflow" in sys.modules)
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    said = {
        size: subprocess.run([sys.executable, *program, size], env=ENVIRONMENT, capture_output=True, text=True).stdout
        # What fits imports everything, and may start where that has been done; a start with -c is always a real one.
        for size, program in (("gpt2-medium", ("-c", code)), ("gpt2", (str(script),)))
    }
    assert said["gpt2-medium"].startswith(f"{ExitCode.MEMORY.value} --model=transformer does not fit") and said[
        "gpt2-medium"
    ].endswith("False\n"), said
    assert "--source_args=nothing=1: --source=text has no option 'nothing'" in said["gpt2"], said  # 2 GB fit
