"""Calibration: run folders in, a hardware description out, whose step times are those that were measured."""

import json

import pytest

from tfdist import flags
from tfdist.control.exit_codes import ConfigError
from tfdist.plan import model_shape
from tfdist.planner.calibrate import calibrate, read_run, terms
from tfdist.planner.estimate import Plan, estimate
from tfdist.planner.hardware import load_hardware
from tfdist.planner.layout import Layout

TRAIN = ["--source=text", "--sequence_length=128", "--model=transformer", "--model_args=size=small"]
FIXED, RATE, BETA = (
    0.004,
    40e9,
    300e6,
)  # seconds, operations and bytes a second: a slow machine that follows the model exactly


def shape(config):
    return model_shape(config, [], input_shape="", outputs=0)


def make_run(folder, workers, batch, hardware, noise=1.0):
    """A run folder as tfdist.train leaves it, with the step times of that machine."""
    config = flags.parse([*TRAIN, f"--global_batch={batch}", "--steps=100"]).config
    one, work, traffic = terms(shape(config), workers, batch, hardware)
    seconds = (FIXED * one + work / RATE + traffic / BETA) * noise
    (folder / "logs").mkdir(parents=True)
    flags.write_flagfile(config, folder / "flags.txt", command="")
    records = [{"v": 1, "attempt": 0, "kind": "start", "step": 0, "values": {"workers": workers, "replicas": workers}}]
    records += [
        {"v": 1, "attempt": 0, "kind": "train", "step": step, "values": {"perf/steps_per_s": rate}}
        for step, rate in ((20, 0.001), (40, 1 / seconds), (60, 1 / seconds), (80, 9.0), (100, 1 / seconds))
    ]
    (folder / "logs" / "rank-0.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records) + '{"v": 1, "kin'
    )
    return seconds


def predicted(hardware, workers, batch):
    config = flags.parse([*TRAIN, f"--global_batch={batch}", "--steps=100"]).config
    return estimate(
        Plan(config, shape(config), hardware, workers), Layout(data=workers, micro_batch=batch // workers)
    ).step.total


@pytest.mark.parametrize("shared", [0, 2])
def test_three_runs_tell_everything(shared, tmp_path):
    """Two sizes on one worker and one on two: the step of four workers is then known."""
    hardware = load_hardware(f"cpu,shared={shared}")
    for name, workers, batch in (("a", 1, 8), ("b", 1, 32), ("c", 2, 32)):
        make_run(tmp_path / name, workers, batch, hardware)
    found = calibrate(hardware, [read_run(str(tmp_path / name)) for name in "abc"], shape)
    assert (
        found.step_ms == pytest.approx(FIXED * 1e3)
        and found.efficiency * found.float32_tflops * 1e12 == pytest.approx(RATE)
        and found.node_gbs * 1e9 == pytest.approx(BETA)
    )
    measured = make_run(tmp_path / "d", 4, 32, hardware)
    assert predicted(found, 4, 32) == pytest.approx(measured, rel=0.02)  # the planner adds the update


@pytest.mark.parametrize(
    "flag",
    [
        "--mesh=model=2",
        "--mesh=data=2, model = 2",
        "--mesh=pipe=2",
        "--mesh=data=2,expert=2",
        "--zero=3",
        "--recompute=block",
        "--compression=bf16",
        "--horovod_compression=fp16",
        "--strategy=parameter_server",
    ],
)
def test_runs_that_divide_more_than_samples_are_refused(flag, tmp_path):
    """Their work and traffic is not what the fit assumes."""
    make_run(tmp_path / "a", 2, 8, load_hardware("cpu"))
    flags_file = tmp_path / "a" / "flags.txt"
    flags_file.write_text(f"{flags_file.read_text()}\n{flag}\n")
    with pytest.raises(ConfigError, match=f"--calibrate=.*/a was trained with {flag}: give runs whose workers have"):
        read_run(str(tmp_path / "a"))


def test_the_fullest_processor_sets_the_pace():
    """Three workers on two processors: the two that share one are what the third waits for."""
    crowded, own = load_hardware("cpu,shared=2"), load_hardware("cpu")
    assert [crowded.crowding(workers) for workers in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3] and own.crowding(64) == 1
    assert predicted(crowded, 3, 24) == pytest.approx(2 * predicted(own, 3, 24)) and predicted(
        crowded, 2, 24
    ) == predicted(own, 2, 24)


def test_one_run_tells_the_rate(tmp_path):
    hardware = load_hardware("cpu,step_ms=4")
    measured = make_run(tmp_path / "a", 1, 16, hardware)
    found = calibrate(hardware, [read_run(str(tmp_path / "a"))], shape)
    assert found.efficiency * found.float32_tflops * 1e12 == pytest.approx(RATE) and (
        found.step_ms,
        found.network_gbs,
    ) == (4, hardware.network_gbs)
    assert predicted(found, 1, 16) == pytest.approx(measured, rel=0.05)


def test_noise_makes_nothing_negative(tmp_path):
    hardware = load_hardware("cpu")
    for name, workers, batch, noise in (("a", 1, 8, 1.0), ("b", 1, 32, 1.05), ("c", 2, 32, 0.3)):
        make_run(tmp_path / name, workers, batch, hardware, noise)
    found = calibrate(hardware, [read_run(str(tmp_path / name)) for name in "abc"], shape)
    assert found.step_ms >= 0 and found.efficiency > 0 and found.network_gbs > 0 and predicted(found, 8, 32) > 0


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        read_run(str(tmp_path))
    make_run(tmp_path / "a", 1, 8, load_hardware("cpu"))
    log = tmp_path / "a" / "logs" / "rank-0.jsonl"
    log.write_text("\n".join(log.read_text().splitlines()[:2]))
    with pytest.raises(ConfigError, match="fewer than two log lines"):
        read_run(str(tmp_path / "a"))


def test_a_store_that_cannot_be_used_is_told_with_the_flag(s3):
    with pytest.raises(ConfigError, match="--calibrate: s3://nowhere/run.*the bucket or folder does not exist"):
        read_run("s3://nowhere/run")
