"""What --jit_tune concludes from what it measures, and that it remembers."""

import json

import pytest
import tensorflow as tf

from tfdist.config import Config
from tfdist.control.exit_codes import ConfigError
from tfdist.run import jit_tune
from tfdist.runtime.one_device import OneDevice


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """seconds without and with XLA, or the error of the latter -> what came out, and how often steps were timed."""
    asked = []

    def tuned(without, compiled):
        def seconds(config, runtime, rooms):
            asked.append(config.model.jit_compile)
            if config.model.jit_compile and isinstance(compiled, Exception):
                raise compiled
            return jit_tune.Timed(compiled if config.model.jit_compile else without, fused=False)

        monkeypatch.setattr(jit_tune, "_timed", seconds)
        config, message = jit_tune.tuned(Config().replace(jit_tune=True), OneDevice(), tmp_path)
        return config.model.jit_compile, message, len(asked)

    return tuned


@pytest.mark.parametrize(
    "without, compiled, uses, says",
    [
        (0.2, 0.1, True, "XLA makes a step take 100 ms instead of 200 ms: used"),
        (0.1, 0.098, False, "98 ms instead of 100 ms: not used"),
        (0.1, 0.3, False, "300 ms instead of 100 ms: not used"),
        (
            0.1,
            ConfigError("--jit_compile cannot compile what cannot be: drop it."),
            False,
            "not used: --jit_compile cannot compile what cannot be",
        ),
        (
            0.1,
            tf.errors.InvalidArgumentError(None, None, "Detected unsupported operations"),
            False,
            "not used: it cannot compile this model",
        ),
    ],
    ids=["faster", "hardly faster", "slower", "refused", "not compiled"],
)
def test_the_faster_one_is_used(without, compiled, uses, says, tuned):
    used, message, _ = tuned(without, compiled)
    assert used is uses and says in message


def test_a_run_remembers(tuned):
    assert tuned(0.2, 0.1) == (*tuned(0.1, 0.2)[:2], 2)


def test_what_cannot_be_read_is_measured_again(tuned, tmp_path):
    (tmp_path / jit_tune.FILE).write_text("{")
    assert tuned(0.2, 0.1)[0] and json.loads((tmp_path / jit_tune.FILE).read_text())["jit_compile"]


@pytest.mark.parametrize(
    ("times", "chosen", "says"),
    [
        ((10, 8, 9, 5), (True, False), "5 ms instead of 8 ms: used"),
        ((10, 12, 7, 9), (False, False), "operations makes a step take 7 ms instead of 10 ms: used"),
        ((10, 6, 7, 9), (True, True), "operations makes a step take 9 ms instead of 6 ms: not used"),
        ((10, 9.8, 9.9, 9.7), (False, True), "XLA makes a step take 9.8 ms instead of 10 ms: not used; Batch"),
        ((10, None, 7, None), (False, False), "it cannot compile this model; BatchNormalization as several"),
    ],
    ids=["both", "composed", "XLA", "as it is", "no XLA"],
)
def test_of_four_ways_the_fastest_is_used(times, chosen, says, monkeypatch, tmp_path):
    """times: in ms, as it is, with XLA, composed, composed with XLA."""

    def timed(config, runtime, limits):
        found = times[config.model.jit_compile + 2 * (not config.model.fused_batchnorm)]
        if found is None:
            raise tf.errors.InvalidArgumentError(None, None, "Detected unsupported operations")
        return jit_tune.Timed(found / 1e3, config.model.fused_batchnorm)

    monkeypatch.setattr(jit_tune, "_timed", timed)
    config, message = jit_tune.tuned(Config().replace(jit_tune=True), OneDevice(), tmp_path)
    assert (config.model.jit_compile, config.model.fused_batchnorm) == chosen and says in message
    again, _ = jit_tune.tuned(Config().replace(jit_tune=True), OneDevice(), tmp_path)
    assert again == config


def test_a_run_of_an_older_version_goes_on_as_it_was(monkeypatch, tmp_path):
    (tmp_path / jit_tune.FILE).write_text('{"jit_compile": true, "message": "as it was"}')
    monkeypatch.delattr(jit_tune, "_timed")
    config, message = jit_tune.tuned(Config().replace(jit_tune=True), OneDevice(), tmp_path)
    assert config.model.jit_compile and config.model.fused_batchnorm and message == "as it was"
