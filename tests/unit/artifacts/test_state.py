"""What a snapshot holds: nothing is left out, and nothing that does not fit is taken."""

import random
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.artifacts import backup_checks, restore, state
from tfdist.artifacts.snapshot_folder import FolderOptions, SnapshotFolder
from tfdist.config import Config
from tfdist.control.exit_codes import CheckpointError
from tfdist.runtime.encoding import decode, encode

CONFIG = Config().replace(steps=10, global_batch=4)


def make(width=3, seed=0):
    keras.utils.set_random_seed(seed)
    inner = keras.Sequential([keras.layers.Dense(width), keras.layers.Dropout(0.5)])
    model = keras.Sequential(
        [keras.layers.Input((4,)), inner, keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    )
    optimizer = keras.optimizers.Adam(0.1, use_ema=True)
    optimizer.build(model.trainable_variables)
    return model, optimizer, {"step": tf.Variable(7, dtype=tf.int64, name="step")}


def test_everything_is_collected():
    model, optimizer, train = make()
    variables = state.collect(model, optimizer, train)
    names = [name for name, *_ in state.table(variables).values()]
    assert sum("seed_generator_state" in name for name in names) == 1  # in a nested model
    for part in ("moving_mean", "kernel", "iteration", "velocity", "average", "step"):
        assert any(part in name for name in names), part
    assert len(names) == len(model.variables) + len(optimizer.variables) + 1


def test_round_trip_into_another_model():
    model, optimizer, train = make()
    optimizer.apply([tf.ones_like(variable.value) for variable in model.trainable_variables], model.trainable_variables)
    arrays = state.to_host(state.collect(model, optimizer, train))
    other = state.collect(*make(seed=1))
    state.assign(other, arrays)
    for key, array in state.to_host(other).items():
        np.testing.assert_array_equal(array, arrays[key])


def test_copies_do_not_change_with_the_variables():
    model, optimizer, train = make()
    variables = state.collect(model, optimizer, train)
    arrays = state.to_host(variables)
    before = {key: array.copy() for key, array in arrays.items()}
    for _ in range(2):
        optimizer.apply(
            [tf.ones_like(variable.value) for variable in model.trainable_variables], model.trainable_variables
        )
    for key in arrays:
        np.testing.assert_array_equal(arrays[key], before[key])


def test_copies_into_the_memory_of_earlier_ones():
    model, optimizer, train = make()
    train |= {"half": tf.Variable(tf.ones((2, 3), tf.bfloat16)), "truth": tf.Variable(True)}
    variables = state.collect(model, optimizer, train)
    earlier = state.to_host(variables)
    optimizer.apply([tf.ones_like(variable.value) for variable in model.trainable_variables], model.trainable_variables)
    train["half"].assign_add(train["half"])
    later = state.to_host(variables, into=earlier)
    for key, array in state.to_host(variables).items():
        assert later[key] is earlier[key]
        np.testing.assert_array_equal(later[key], array)
    assert (
        state.to_host(variables, into={"train/truth": np.zeros(3, bool)})["train/truth"].shape == ()
    )  # of another run: not used


def test_misfits_are_named_before_anything_changes():
    arrays = state.to_host(state.collect(*make(width=3)))
    other = state.collect(*make(width=5))
    before = state.to_host(other)
    with pytest.raises(CheckpointError, match=r"kernel is float32 \(4, 5\) here, float32 \(4, 3\) there"):
        state.assign(other, arrays)
    del arrays["train/step"], arrays["model/0001"]
    lacks = "lacks 2 variables of this run [(]for example "
    with pytest.raises(CheckpointError, match=f"of another model or optimizer: it {lacks}[^ ]+[)]. Use the model"):
        state.assign(other, arrays)
    more = "has 1 that this run lacks [(]for example model/9999[)]. Use the model"
    with pytest.raises(CheckpointError, match=f"{lacks}[^ ]+[)] and {more}"):
        state.assign(other, arrays | {"model/9999": np.zeros(1)})
    for key, array in state.to_host(other).items():
        np.testing.assert_array_equal(array, before[key])


def unsized():
    """Variables of strings, or without a fixed shape."""
    return {
        "hidden/0000": tf.Variable(tf.zeros((0, 2)), shape=[None, 2]),
        "hidden/0001": tf.Variable(tf.zeros((0,)), shape=tf.TensorShape(None)),
        "hidden/0002": tf.Variable(""),
        "hidden/0003": tf.Variable(["", ""]),
        "model/0000": tf.Variable([0.0, 0.0]),
    }


VALUES = [np.ones((4, 2), "float32"), np.ones((3, 1, 1), "float32"), b"one\0", [b"two", b"three"], [5.0, 6.0]]


def test_strings_and_variables_without_a_fixed_shape_come_back(tmp_path):
    """Backups and snapshots were written that no run could read."""
    before, after = unsized(), unsized()
    for variable, value in zip(before.values(), VALUES, strict=True):
        variable.assign(value)
    store = SnapshotFolder(tmp_path / "checkpoints")
    store.write(5, state.to_host(before), {"variables": state.table(before)})
    snapshot = store.verify(5)
    state.check(state.table(after), store.table(snapshot))
    state.check(state.table(after), {key: entry[1:] for key, entry in snapshot.manifest["variables"].items()})
    state.assign(after, store.read(snapshot))
    for variable, value in zip(after.values(), VALUES, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    with pytest.raises(CheckpointError, match=r"is float32 \(None, 2\) here, float32 \(4, 3\) there"):
        state.assign(after, state.to_host(before) | {"hidden/0000": np.ones((4, 3), "float32")})
    metrics: Any = SimpleNamespace(metrics_variables=list(after.values())[:2])
    assert [shape for _, shape in backup_checks.metrics_of(metrics)] == [[None, 2], None]


def test_other_workers_take_the_chiefs_strings_and_arrays_of_any_shape():
    before = unsized()
    for variable, value in zip(before.values(), VALUES, strict=True):
        variable.assign(value)
    sent: dict[str, Any] = {}

    def send(arrays):
        sent["arrays"] = arrays
        return arrays

    def send_object(value):
        sent["object"] = encode(value)
        return value

    def receive(arrays):
        assert [(each.shape, each.dtype) for each in arrays] == [(each.shape, each.dtype) for each in sent["arrays"]]
        return sent["arrays"]

    chief: Any = SimpleNamespace(broadcast=send, broadcast_object=send_object)
    other: Any = SimpleNamespace(broadcast=receive, broadcast_object=lambda value: decode(sent["object"]))
    expected = state.chiefs_arrays(chief, state.table(before), state.to_host(before))
    found = state.chiefs_arrays(other, state.table(unsized()), {})
    assert found.keys() == expected.keys() == before.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array)


def test_host_generators():
    random.seed(3)
    np.random.seed(3)
    states = state.generator_states()
    expected = [random.random(), random.gauss(0, 1), np.random.normal(), np.random.rand()]
    import json

    state.restore_generator_states(json.loads(json.dumps(states)))
    assert [random.random(), random.gauss(0, 1), np.random.normal(), np.random.rand()] == expected


def stored(tmp_path, config=CONFIG, **fields):
    store = SnapshotFolder(tmp_path / "checkpoints")
    store.write(
        5,
        {"train/step": np.array(5)},
        {"config_digest": config.digest(), "identity": config.identity(), "consumed": 20, **fields},
    )
    return store


def test_choice(tmp_path):
    assert restore.pick_snapshot(SnapshotFolder(tmp_path / "none"), CONFIG) == (None, [])
    with pytest.raises(CheckpointError, match="--resume=must"):
        restore.pick_snapshot(SnapshotFolder(tmp_path / "none"), CONFIG.replace(resume="must"))
    store = stored(tmp_path)
    assert restore.pick_snapshot(store, CONFIG)[0].step == 5
    with pytest.raises(CheckpointError, match="--resume=never"):
        restore.pick_snapshot(store, CONFIG.replace(resume="never"))


def test_another_configuration_is_refused_with_the_fields_that_differ(tmp_path):
    store = stored(tmp_path)
    other = CONFIG.replace(seed=3, learning_rate=0.5, run_dir="elsewhere")
    with pytest.raises(CheckpointError) as error:
        restore.pick_snapshot(store, other)
    assert (
        "--seed: 0 there, 3 now" in str(error.value)
        and str(error.value).endswith(" or, if the variables are the same, allow it with --allow_config_change.")
        and "--learning_rate" in str(error.value)
        and "run_dir:" not in str(error.value)
    )
    assert restore.pick_snapshot(store, other.replace(allow_config_change=True))[0].step == 5


def test_a_refusal_names_the_flag_of_what_is_refused(tmp_path):
    backup = stored(tmp_path)
    backup = SnapshotFolder(backup.directory, options=FolderOptions(flag="--backup_dir"))
    for config in (CONFIG.replace(seed=3), CONFIG.replace(resume="never")):
        with pytest.raises(CheckpointError, match="choose another --backup_dir"):
            restore.pick_snapshot(SnapshotFolder(tmp_path / "none"), config, [backup])


def test_an_inconsistent_snapshot_is_not_trusted():
    manifest = {"step": 5, "consumed": 20, "identity": CONFIG.identity()}
    restore.check_consistency(manifest, 5, 4)
    for step, changes, global_batch in ((6, {}, 4), (5, {"consumed": 24}, 4), (5, {}, 3)):
        with pytest.raises(CheckpointError):
            restore.check_consistency({**manifest, **changes}, step, global_batch)
