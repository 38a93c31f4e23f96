"""Augmentations: what they may change, that they depend on the seeds alone, and bad names and inputs."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError, DataError
from tfdist.data import augment, input_pipeline, order
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.sources.split import array_split

IMAGES = np.random.default_rng(0).random([400, 8, 8, 3], np.float32)
LABELS = np.arange(400, dtype=np.int32)


def run(name: str, images: np.ndarray = IMAGES, seed: int = 0) -> np.ndarray:
    seeds = order.element_seeds(tf.range(len(images), dtype=tf.int64), seed)
    x, y = augment.load_augmentation(name)(tf.constant(images), tf.constant(LABELS), seeds)
    np.testing.assert_array_equal(y, LABELS)
    return x.numpy()


def test_none():
    assert augment.load_augmentation("none") is None


@pytest.mark.parametrize("name", ["flip", "flip_crop", "random_resized_crop", "shift"])
def test_depends_on_the_seeds_alone_and_keeps_the_shape(name):
    once = run(name)
    assert once.shape == IMAGES.shape and once.dtype == np.float32
    np.testing.assert_array_equal(once, run(name))
    assert (once != run(name, seed=1)).any()
    # A sample alone is augmented as within its batch.
    seeds = order.element_seeds(tf.constant([7], tf.int64), 0)
    alone, _ = augment.load_augmentation(name)(tf.constant(IMAGES[7:8]), tf.constant(LABELS[7:8]), seeds)
    np.testing.assert_allclose(alone[0], once[7], atol=1e-6)


def test_flip_mirrors_half_of_the_images_left_to_right():
    out = run("flip")
    mirrored = (out == IMAGES[:, :, ::-1]).all((1, 2, 3))
    assert (mirrored | (out == IMAGES).all((1, 2, 3))).all()
    assert 150 < mirrored.sum() < 250


@pytest.mark.parametrize(("name", "pad", "mirrors"), [("shift", 1, False), ("flip_crop", 4, True)])
def test_pad_and_crop_reaches_every_offset(name, pad, mirrors):
    padded = np.pad(IMAGES, [(0, 0), (pad, pad), (pad, pad), (0, 0)])
    seen = set()
    for image, whole in zip(run(name), padded, strict=True):
        matches = {
            (top, left, flipped)
            for flipped in ((False, True) if mirrors else (False,))
            for top in range(2 * pad + 1)
            for left in range(2 * pad + 1)
            if ((whole[:, ::-1] if flipped else whole)[top : top + 8, left : left + 8] == image).all()
        }
        assert matches
        seen |= matches
    rows, columns, flips = (set(values) for values in zip(*seen, strict=True))
    assert rows == columns == set(range(2 * pad + 1)) and len(flips) == 1 + mirrors


def test_random_resized_crop_zooms_in():
    ramp = np.broadcast_to(np.linspace(0, 1, 16, dtype=np.float32)[None, None, :, None], [400, 16, 16, 1])
    out = run("random_resized_crop", ramp)[:, 0, :, 0]
    spread = np.abs(out[:, -1] - out[:, 0])  # the part of the width that is seen
    assert out.min() >= 0 and out.max() <= 1 and spread.max() <= 1.0001
    assert 0.2 < spread.min() < 0.45 and spread.max() > 0.9  # sqrt(0.08 * 3 / 4) is 0.245
    assert 120 < (out[:, 0] > out[:, -1]).sum() < 280  # mirrored


@pytest.mark.slow
def test_a_sample_changes_from_epoch_to_epoch_but_not_with_the_number_of_replicas():
    split = array_split("images", (IMAGES[:6], LABELS[:6]))

    def batches(replicas: int, augmentation: str) -> np.ndarray:
        parts = [
            list(
                input_pipeline.train_dataset(
                    split,
                    input_pipeline.Reading(seed=0, shuffle=False, augment=augment.load_augmentation(augmentation)),
                    plan=BatchPlan(6, 1, replicas),
                    replica=r,
                    consumed=0,
                )
                .take(5)
                .as_numpy_iterator()
            )
            for r in range(replicas)
        ]
        return np.stack([np.concatenate([parts[r][s][0] for r in range(replicas)]) for s in range(5)])

    alone = batches(1, "flip_crop")
    for replicas in (2, 3, 4):
        np.testing.assert_array_equal(batches(replicas, "flip_crop"), alone)
    assert len({image.tobytes() for image in alone[:, 0]}) > 1
    assert len({image.tobytes() for image in batches(1, "none")[:, 0]}) == 1


def test_user_function(tmp_path, monkeypatch):
    (tmp_path / "my_augment.py").write_text(
        "def double(x, y, seeds):\n    return x * 2, y\ndef wrong(x, y, seeds):\n    return x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    np.testing.assert_array_equal(run("my_augment:double"), IMAGES * 2)
    split = array_split("images", (IMAGES, LABELS))
    with pytest.raises(DataError, match="must return"):
        input_pipeline.train_dataset(
            split,
            input_pipeline.Reading(seed=0, shuffle=True, augment=augment.load_augmentation("my_augment:wrong")),
            plan=BatchPlan(6, 1, 1),
            replica=0,
            consumed=0,
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flop", "--augment=flop is unknown: use none, flip"),
        ("no_such_module:f", "no module 'no_such_module'"),
        ("math:cosinus", "no function 'cosinus'"),
    ],
)
def test_bad_names(name, message):
    with pytest.raises(ConfigError, match=message):
        augment.load_augmentation(name)


def test_images_are_required():
    with pytest.raises(DataError, match="--augment=shift is for batches of images"):
        run("shift", IMAGES[:, 0])


@pytest.mark.parametrize("name", ["flip", "flip_crop", "random_resized_crop", "shift"])
def test_targets_with_places_are_refused(name):
    """They would stay where they are while x moves. An augmentation of one's own moves both by the same seeds."""
    function, x = augment.load_augmentation(name), tf.constant(IMAGES[:4])
    seeds = order.element_seeds(tf.range(4, dtype=tf.int64), 0)
    for y in (tf.zeros([4, 8, 8], tf.int32), tf.zeros([4, 8, 8, 1]), {"boxes": tf.zeros([4, 5, 4])}):
        with pytest.raises(
            DataError, match=f"--augment={name} moves what x shows, .* y says of it .shape .[85], .* of your own"
        ):
            function(x, y, seeds)
    for y in (tf.zeros([4, 3]), tf.zeros([4, 1, 1, 3]), None):
        function(x, y, seeds)


def test_an_augmentation_that_is_none(tmp_path, monkeypatch):
    (tmp_path / "wrong_augmentations.py").write_text(
        "def two(x, y): return x, y\ndef fails(x, y, seeds): return x['image'], y\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"--augment=wrong_augmentations:two takes \(x, y\): an augmentation is a function \(x, y, seeds\)",
    ):
        augment.load_augmentation("wrong_augmentations:two")
    split = array_split("mine", (np.zeros([9, 4]), np.zeros(9)))
    with pytest.raises(
        ConfigError,
        match=r"--augment=wrong_augmentations:fails failed at .*wrong_augmentations\.py:2, in fails: TypeError",
    ):
        input_pipeline.train_dataset(
            split,
            input_pipeline.Reading(
                seed=0, shuffle=True, augment=augment.load_augmentation("wrong_augmentations:fails")
            ),
            plan=BatchPlan(3, 1, 1),
            replica=0,
            consumed=0,
        )


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (
            (tf.zeros([2, 4]), tf.zeros([2])),
            r"returned \(2, 4\) for 9 samples of mine: x and y must keep a row for each",
        ),
        ((tf.zeros([]), tf.zeros([9])), r"returned \(\) for 9 samples"),
        ((tf.zeros([9, 4]), 3), "returned int for mine: x and y must be tensors"),
    ],
)
def test_results_that_are_no_micro_batch(result, words):
    with pytest.raises(DataError, match=words):
        augment.apply(lambda x, y, seeds: result, (tf.zeros([9, 4]), tf.zeros([9])), tf.zeros([9, 2], tf.int32), "mine")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("x + tf.random.normal(tf.shape(x))", "draws by RandomStandardNormal"),
        ("x + keras.random.normal(tf.shape(x), seed=SEEDS)", "sets a variable"),
        ("x + GENERATOR.normal(tf.shape(x))", "draws by RngReadAndSkip"),
        ("x + COUNT.assign_add(1.0)", "sets a variable"),
        ("tf.map_fn(lambda row: row + tf.random.uniform([]), x)", "draws by RandomUniform"),
        ("x + tf.random.stateless_normal(tf.shape(x), seeds[0])", ""),
    ],
)
def test_an_augmentation_that_draws_or_keeps_something(body, words, tmp_path, monkeypatch):
    (tmp_path / "drawing_augmentations.py").write_text(
        "import keras\nimport tensorflow as tf\nSEEDS, COUNT = keras.random.SeedGenerator(1), tf.Variable(0.0)\n"
        f"GENERATOR = tf.random.Generator.from_seed(1)\ndef draws(x, y, seeds): return {body}, y\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "drawing_augmentations", raising=False)
    function = augment.load_augmentation("drawing_augmentations:draws")
    data = tf.data.Dataset.from_tensors((tf.zeros([3, 4]), tf.zeros([3]), tf.zeros([3, 2], tf.int32)))
    if not words:
        assert len(data.map(function)) == 1
        return
    with pytest.raises(ConfigError, match=f"--augment=drawing_augmentations:draws {words}.*draw only from its `seeds`"):
        data.map(function)
