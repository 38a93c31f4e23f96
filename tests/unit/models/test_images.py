"""The image models: parameter counts, sizes of images, scale of the input, and that the cnn learns."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.models.applications import applications, resnet50
from tfdist.models.cnn import cnn
from tfdist.models.mlp import mlp
from tfdist.models.vit import vit


def image(side: int, channels: int = 3) -> tf.TensorSpec:
    return tf.TensorSpec((side, side, channels), tf.float32)


def trainable(model: keras.Model) -> int:
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)


def test_mlp_count():
    assert trainable(mlp(x_spec=image(8, 1), num_outputs=10, widths=(32, 16))) == 65 * 32 + 33 * 16 + 17 * 10


def test_cnn_count_and_bias():
    batch = cnn(x_spec=image(8, 1), num_outputs=10)
    assert trainable(batch) == 9 * 32 + 2 * 32 + 9 * 32 * 64 + 2 * 64 + (2 * 2 * 64 + 1) * 10
    assert trainable(cnn(x_spec=image(8, 1), num_outputs=10, norm="none")) == trainable(batch) - 32 - 64
    group = cnn(x_spec=image(8, 1), num_outputs=10, norm="group")
    assert trainable(group) == trainable(batch)
    assert not group.non_trainable_variables
    assert [group.get_layer(name).groups for name in ("norm_00", "norm_01")] == [4, 8]


@pytest.mark.parametrize(
    ("spec", "last"),
    [(image(1, 1), 64), (image(8, 1), 4 * 64), (image(28, 1), 9 * 64), (image(32), 16 * 64), (image(96), 64)],
)
def test_cnn_adapts_to_the_image(spec, last):
    model = cnn(x_spec=spec, num_outputs=10)
    assert model.get_layer("logits").kernel.shape == (last, 10)
    assert model.output_shape == (None, 10)


@pytest.mark.slow
def test_cnn_learns_the_digits():
    datasets = pytest.importorskip("sklearn.datasets")
    keras.utils.set_random_seed(0)
    images, labels = datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    held_out = np.arange(len(labels)) % 5 == 4
    model = cnn(x_spec=image(8, 1), num_outputs=10, widths=(16, 32))
    model.compile(
        keras.optimizers.Adam(2e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    model.fit(images[~held_out], labels[~held_out], batch_size=64, epochs=6, verbose=0)
    assert model.evaluate(images[held_out], labels[held_out], verbose=0)[1] > 0.95


def test_resnet50_and_vit_have_the_published_number_of_parameters():
    with keras.StatelessScope(initialize_variables=False):  # counts shapes; allocates nothing
        base = vit(x_spec=image(224), num_outputs=1000, size="base")
        with_class = {
            size: vit(x_spec=image(224), num_outputs=1000, size=size, pool="class") for size in ("small", "base")
        }
        resnet = resnet50(x_spec=image(224), num_outputs=1000)
    # 86,567,656 of Dosovitskiy et al., less the class token and its position
    assert trainable(base) == 86_567_656 - 2 * 768
    assert {size: trainable(model) for size, model in with_class.items()} == {"small": 22_050_664, "base": 86_567_656}
    assert sum(int(np.prod(v.shape)) for v in resnet.variables) == 25_636_712


@pytest.mark.parametrize("pool", ["mean", "class"])
def test_vit_sees_all_patches_and_their_places(pool):
    keras.utils.set_random_seed(0)
    model = vit(x_spec=image(8, 1), num_outputs=10, layers=1, width=16, heads=2, pool=pool)
    x = np.zeros((1, 8, 8, 1), np.float32)
    corners = []
    for row, column in ((0, 0), (0, 7), (7, 0), (7, 7)):
        changed = x.copy()
        changed[0, row, column] = 1
        corners.append(model(changed).numpy())
    assert all(np.abs(c - model(x)).max() > 1e-6 for c in corners)
    one, other = x.copy(), x.copy()  # the same patch in two places
    one[0, :2, :2], other[0, 6:, 6:] = 1, 1
    assert np.abs(model(one) - model(other)).max() > 1e-7


def test_vit_default_patch():
    for side, patches in ((8, 16), (28, 49), (32, 64), (224, 196)):
        with keras.StatelessScope(initialize_variables=False):
            model = vit(x_spec=image(side), num_outputs=10, layers=1)
        assert model.get_layer("embed_positions").embeddings.shape[0] == patches


@pytest.mark.parametrize(
    ("name", "low", "high"), [("MobileNetV2", -1, 1), ("EfficientNetV2B0", 0, 255), ("MobileNetV3Small", 0, 255)]
)
def test_applications_scale_0_to_1_to_what_the_network_takes(name, low, high):
    with keras.StatelessScope(initialize_variables=False):
        model = applications(x_spec=image(32), num_outputs=10, name=name)
    scale = model.get_layer("from_0_to_1")
    assert (float(scale(0.0)), float(scale(1.0))) == (low, high)
    assert model.output_shape == (None, 10)
    assert model.layers[-1].dtype_policy.compute_dtype == "float32"


def test_integer_images_are_refused():
    with pytest.raises(ConfigError, match="takes floating images"):
        cnn(x_spec=tf.TensorSpec((8, 8, 1), tf.uint8), num_outputs=10)
