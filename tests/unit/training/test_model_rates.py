"""Model FLOPs, MFU, scaling efficiency: by formula, by graph, by hand."""

import dataclasses
import json

import keras
import pytest
import tensorflow as tf

from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.data.sources.split import Split
from tfdist.models.build_model import build_model
from tfdist.planner.estimate import Plan, Proposal, estimate
from tfdist.planner.hardware import DEVICES
from tfdist.planner.layout import Layout
from tfdist.planner.plan_text import as_text
from tfdist.planner.shapes import from_json
from tfdist.runtime.one_device import OneDevice
from tfdist.telemetry.rates import Rates
from tfdist.training.model_cost import count, forward_flops
from tfdist.training.model_rates import baseline, make_rates, memory
from tfdist.training.objectives import classification


def make(model, **options):
    """(rates of a built-in transformer on 8 tokens, or of `model` on the same)"""
    config = Config().replace(model="transformer", model_args="size=tiny", **options)
    x = tf.TensorSpec([8], tf.int32)
    split = Split("train", 100, (x, x), lambda positions: None, 256)
    return make_rates(config, OneDevice(), model or build_model(config.model, x, 256), split, rows=1), x


def test_formula_and_graph_agree():
    rates, x = make(None, peak_tflops=2.0)
    model = build_model(Config().replace(model="transformer", model_args="size=tiny").model, x, 256)
    assert forward_flops(model, x) == pytest.approx(rates.forward_flops, rel=0.01)
    layers, width, tokens = 2, 64, 8
    assert (
        rates.forward_flops
        == 2 * tokens * 12 * layers * width**2 + 4 * tokens**2 * width * layers + 2 * tokens * width * 256
    )
    told = rates.values(1000.0, consumed=250)
    assert told == pytest.approx(
        {
            "perf/tokens_per_s": 8000.0,
            "perf/model_flops_per_s": 3000 * rates.forward_flops,
            "perf/mfu": 3000 * rates.forward_flops / 2e12,
            "data/epoch": 2.5,
        }
    )


def test_a_model_without_formula_is_read_from_its_graph():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, use_bias=True), keras.layers.Dense(3)])
    assert forward_flops(model, tf.TensorSpec([6])) == 2 * (6 * 4 + 4 * 3)


@pytest.mark.parametrize(
    "layers, x, expected",
    [
        ([keras.layers.Conv2DTranspose(5, 3, strides=2, padding="same")], [4, 6, 2], 2 * 4 * 6 * 2 * 3 * 3 * 5),
        ([keras.layers.Conv3DTranspose(5, 2, strides=2)], [2, 3, 4, 2], 2 * 2 * 3 * 4 * 2 * 2**3 * 5),
        ([keras.layers.LSTM(3, unroll=True)], [7, 2], 7 * 2 * (2 + 3) * 4 * 3),
        ([keras.layers.LSTM(3)], [7, 2], 0),  # in a loop
        ([keras.layers.Conv2D(4, 3, groups=2)], [5, 5, 2], 2 * 3 * 3 * 4 * 3 * 3 * 1),
    ],
    ids=["transposed", "transposed 3D", "unrolled", "loop", "groups"],
)
def test_operations_of_other_layers(layers, x, expected):
    model = keras.Sequential([keras.Input(x), *layers])
    assert forward_flops(model, tf.TensorSpec(x)) == expected


def test_a_part_that_computes_in_a_loop_is_told():
    model = keras.Sequential([keras.Input([7, 2]), keras.layers.GRU(3, name="recurrent"), keras.layers.Dense(4)])
    found = count(model, classification(), (tf.TensorSpec([7, 2]), tf.TensorSpec([], tf.int32)))
    assert [part["name"] for part in found["parts"] if not part["is_counted"]] == ["recurrent"]
    told = [line for line in plan_of(found).splitlines() if "loop" in line]
    assert len(told) == 1 and told[0].startswith("not counted: what recurrent computes in a loop")


def plan_of(found):
    hardware = dataclasses.replace(DEVICES["cpu"], memory_gb=8)
    plan = Plan(Config().replace(global_batch=8), from_json(found), hardware, devices=1)
    return as_text(plan, [Proposal(estimate(plan, Layout(micro_batch=8)), "the only one")])


def test_what_is_not_known_is_left_out():
    assert Rates().values(100.0, 5) == {}
    assert Rates(baseline=30.0, workers=4).values(96.0, 0) == {"perf/scaling_efficiency": 0.8}
    assert memory()["memory/host_peak_bytes"] >= memory()["memory/host_bytes"] * 0.5 > 0


def test_the_baseline_is_a_number_or_a_run_of_one_worker(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"workers": 1, "samples_per_s": 12.5}))
    assert (baseline(""), baseline("40"), baseline(str(tmp_path))) == (0.0, 40.0, 12.5)
    (tmp_path / "logs").mkdir()
    log = [(0, 2.0), (0, 50.0), (0, 40.0), (1, 3.0), (1, 60.0)]  # the first of an attempt includes tracing
    with open(tmp_path / "logs" / "rank-0.jsonl", "w") as file:
        for attempt, rate in log:
            record = {"v": 1, "attempt": attempt, "kind": "train", "step": 1, "values": {"perf/samples_per_s": rate}}
            file.write(json.dumps(record) + "\n")
    assert baseline(str(tmp_path)) == 50.0
    starts = [{"v": 1, "attempt": at, "kind": "start", "step": 0, "values": {"workers": 2 - at}} for at in (0, 1)]
    with open(tmp_path / "logs" / "rank-0.jsonl", "a") as file:
        file.writelines(json.dumps(start) + "\n" for start in starts)
    assert baseline(str(tmp_path)) == 60.0  # of the attempt by one worker
    (tmp_path / "logs" / "rank-0.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    with pytest.raises(ConfigError, match="fewer than two log lines of an attempt by one worker: give a run that one"):
        baseline(str(tmp_path))
    (tmp_path / "summary.json").write_text(json.dumps({"workers": 2, "samples_per_s": 12.5}))
    with pytest.raises(ConfigError, match="trained by 2 workers"):
        baseline(str(tmp_path))
    with pytest.raises(ConfigError, match="neither a number nor the folder"):
        baseline(str(tmp_path / "none"))
    for wrong in ("-5", "nan", "inf", "0", "0.0"):
        with pytest.raises(ConfigError, match=f"--scaling_baseline={wrong} is neither a number nor"):
            baseline(wrong)
    (tmp_path / "summary.json").write_text("[1]")
    with pytest.raises(ConfigError, match="neither a number nor the folder"):
        baseline(str(tmp_path))
