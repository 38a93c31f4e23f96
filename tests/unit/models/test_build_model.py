"""How a name or package.module:function becomes a model, what all models promise, and the errors of bad options."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.config import ModelConfig
from tfdist.control.exit_codes import ConfigError
from tfdist.models.build_model import MODELS, build_model

IMAGE = tf.TensorSpec((8, 8, 1), tf.float32)
TOKENS = tf.TensorSpec((8,), tf.int32)
SMALL = {  # model -> (options, x_spec)
    "mlp": ("widths=(8,),dropout=0.1", IMAGE),
    "cnn": ("widths=(4,8),dropout=0.1", IMAGE),
    "transformer": ("layers=1,width=16,heads=2,dropout=0.1", TOKENS),
    "vit": ("layers=1,width=16,heads=2,dropout=0.1", IMAGE),
    "applications": ("name=MobileNetV2,alpha=0.35", tf.TensorSpec((32, 32, 3), tf.float32)),
}


@pytest.fixture(autouse=True)
def _clean_policy():
    keras.utils.set_random_seed(0)
    yield
    keras.mixed_precision.set_dtype_policy("float32")
    keras.backend.clear_session()


def build(
    name: str, options: str | None = None, spec: tf.TensorSpec | None = None, outputs: int | None = 10, **config
) -> keras.Model:
    default_options, default_spec = SMALL.get(name, ("", IMAGE))
    options = default_options if options is None else options
    return build_model(
        ModelConfig(model=name, model_args=options, **config), default_spec if spec is None else spec, outputs
    )


def batch(spec: tf.TensorSpec, n: int = 2) -> np.ndarray:
    random = np.random.default_rng(0)
    if spec.dtype.is_integer:
        return random.integers(0, 10, (n, *spec.shape)).astype(np.int32)
    return random.random((n, *spec.shape), np.float32)


@pytest.mark.slow
def test_every_registered_model_is_covered_here():
    assert set(SMALL) | {"resnet50"} == set(MODELS)  # resnet50 is applications with a name, see test_images.py


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_logits_are_float32_and_finite_under_mixed_float16(name):
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    model = build(name)
    logits = model(batch(SMALL[name][1]))
    assert logits.dtype == tf.float32 and logits.shape[-1] == 10
    assert np.isfinite(logits.numpy()).all()
    assert any(layer.compute_dtype == "float16" for layer in model.layers)


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "vit"])
def test_gradients_reach_every_trainable_variable(name):
    model, x = build(name), batch(SMALL[name][1], 4)
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = tf.reduce_mean(tf.nn.log_softmax(logits)[..., 3])
    for variable, gradient in zip(
        model.trainable_variables, tape.gradient(loss, [v.value for v in model.trainable_variables]), strict=True
    ):
        assert gradient is not None, variable.path
        assert np.abs(tf.convert_to_tensor(gradient).numpy()).max() > 0, variable.path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer", "vit"])
def test_the_seed_decides_the_weights(name):
    def weights(seed):
        keras.utils.set_random_seed(seed)
        return [variable.numpy() for variable in build(name).trainable_variables]

    first, again, other = weights(7), weights(7), weights(8)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_no_two_matrices_start_equal():
    matrices = [
        v.numpy() for v in build("transformer", "layers=2,width=16,heads=2").trainable_variables if len(v.shape) == 2
    ]
    for i, a in enumerate(matrices):
        assert not any(a.shape == b.shape and np.allclose(a, b) for b in matrices[:i])


def test_without_dropout_there_is_no_random_state():
    for name in ("mlp", "cnn", "transformer", "vit"):
        options = "layers=1,width=16,heads=2" if name in ("transformer", "vit") else ""
        assert not build(name, options).non_trainable_variables or name == "cnn"
        assert not any(isinstance(layer, keras.layers.Dropout) for layer in build(name, options).layers)


@pytest.mark.parametrize("synchronized", [True, False])
def test_batch_norm_is_synchronized_at_any_depth(synchronized):
    model = build(f"{__name__}:nested", "", sync_batchnorm=synchronized)
    found = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    assert len(found) == 3
    assert all(layer.synchronized is synchronized for layer in found)
    assert all(
        layer.synchronized
        for layer in build("cnn")._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
    )


def nested(x_spec):
    inner = keras.Sequential(
        [
            keras.layers.Dense(3),
            keras.layers.BatchNormalization(),
            keras.Sequential([keras.layers.BatchNormalization()]),
        ]
    )
    inputs = keras.Input(tuple(x_spec.shape))
    x = keras.layers.TimeDistributed(keras.layers.BatchNormalization())(inputs)
    return keras.Model(inputs, inner(keras.layers.Flatten()(x)))


def own_model(num_outputs, width=4):
    return keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(width), keras.layers.Dense(num_outputs)]
    )


def own_half(input_shape, dtype):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(3, dtype=dtype)])


class Subclassed(keras.Model):
    def __init__(self, dtype):
        super().__init__()
        self.dense = keras.layers.Dense(3, dtype=dtype)

    def build(self, input_shape):
        self.dense.build((None, 64))

    def call(self, x):
        return self.dense(keras.ops.reshape(x, (-1, 64)))


def own_subclassed(x_spec, dtype="float32"):
    model = Subclassed(dtype)
    model.build((None, *x_spec.shape))
    return model


def own_open_ended(**options):
    assert options["x_spec"] is IMAGE and options["num_outputs"] == 10 and options["depth"] == 3
    return own_model(10)


def own_demanding(x_spec, width):
    return own_model(width)


def returns_text():
    return "a model"


def returns_untrainable():
    x = keras.Input((8, 8, 1))
    return keras.Model(x, keras.layers.Flatten()(x))


class Uninitialised(keras.Model):
    def __init__(self):
        self.layer = keras.layers.Dense(3)


def returns_uninitialised():
    return Uninitialised()


def returns_whole_numbers():
    x = keras.Input((8, 8, 1))
    return keras.Model(x, keras.ops.cast(keras.layers.Dense(3)(keras.layers.Flatten()(x)), "int32"))


def returns_unbuilt():
    return keras.Sequential([keras.layers.Dense(3)])


def test_an_own_function_gets_what_its_signature_names():
    assert build(f"{__name__}:own_model").count_params() == 65 * 4 + 5 * 10
    assert build(f"{__name__}:own_model", "width=7").layers[1].units == 7
    build(f"{__name__}:own_open_ended", "depth=3")
    assert build(f"{__name__}:own_half", "dtype=float32").count_params() == 65 * 3
    assert build(f"{__name__}:own_subclassed").count_params() == 65 * 3


def test_num_outputs_can_be_given_as_an_option():
    assert build("mlp", "num_outputs=3", outputs=None).output_shape == (None, 3)
    assert build("mlp", "num_outputs=3", outputs=10).output_shape == (None, 3)
    assert build(f"{__name__}:own_model", "num_outputs=3").outputs[0].shape == (None, 3)


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        ("resnet51", "", r"--model=resnet51 is unknown: use mlp, cnn, .*, or package\.module:function\."),
        (
            "cnn",
            "width=3",
            r"--model_args=width=3: --model=cnn has no option 'width'; it accepts widths, dropout, norm\.",
        ),
        ("cnn", "x_spec=3", r"has no option 'x_spec'"),
        ("cnn", "num_outputs=-1", r"num_outputs=-1: it must be a whole number"),
        ("cnn", "norm=layer", r"norm=layer: use batch, group or none"),
        ("mlp", "dropout=1", r"dropout=1: it must be at least 0 and below 1"),
        (
            "mlp",
            "widths=(-3,)",
            r"--model=mlp with --model_args='widths=\(-3,\)' cannot be built for x of shape \(8, 8, 1\)",
        ),
        ("vit", "patch=3", r"patch=3, which does not divide an image of 8 x 8"),
        ("transformer", "size=huge", r"size=huge: use tiny, small, gpt2, gpt2-medium"),
        ("transformer", "heads=5", r"width=64 and heads=5: heads must divide"),
        ("transformer", "layers=two", r"layers=two: it must be a whole number"),
        ("transformer", "context=4", r"context=4, shorter than the sequences of 8 tokens"),
        ("transformer", "vocabulary=9", r"vocabulary=9, but the source has 10 tokens"),
        ("applications", "name=LeNet", r"name=LeNet, which keras.applications does not have: use one of .*ResNet50"),
        ("applications", "name=ResNet50,alpha=1", r"has no option 'alpha'; it accepts name"),
        ("no_such_package.models:build", "", r"there is no module 'no_such_package.models'"),
        (f"{__name__}:no_such_function", "", r"has no function 'no_such_function'"),
        (f"{__name__}:own_demanding", "", r"own_demanding needs width: give for example --model_args=width=VALUE"),
        (f"{__name__}:own_model", "depth=3", r"has no option 'depth'; it accepts width\."),
        (f"{__name__}:returns_text", "", r"returned str: it must return a keras\.Model"),
        (f"{__name__}:own_half", "dtype=bfloat16", r'returns bfloat16: give its last layer dtype="float32"\.'),
        (f"{__name__}:own_subclassed", "dtype=float16", r'returns float16: give its last layer dtype="float32"\.'),
        (f"{__name__}:returns_text", "num_outputs=3", r"has no option 'num_outputs'; it accepts none\."),
        (f"{__name__}:returns_unbuilt", "", r"returned a model without variables"),
        (f"{__name__}:returns_untrainable", "", r"returned a model that has no variables to train"),
        (f"{__name__}:returns_uninitialised", "", r"returns_uninitialised failed"),
        (f"{__name__}:returns_whole_numbers", "", r"returns int32, which has no gradient"),
        ("mlp", "widths={}", r"widths=\{\}: write for example widths=\(128,128\)"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(model, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build(model, options)


def test_data_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"takes floating images .* but a sample's x is int32 \(8,\)"):
        build("cnn", "", TOKENS)
    with pytest.raises(ConfigError, match=r"takes integer tokens .* but a sample's x is float32 \(8, 8, 1\)"):
        build("transformer", "", IMAGE)
    with pytest.raises(ConfigError, match="takes one tensor, but a sample's x is"):
        build("mlp", "", {"a": IMAGE})
    with pytest.raises(ConfigError, match=r"needs a number of classes, .*--model_args=num_outputs=10\."):
        build("mlp", "", outputs=None)
    with pytest.raises(ConfigError, match="cannot be built for x of shape \\(8, 8, 1\\)"):
        build("resnet50", "")


def test_a_source_that_tells_no_number_of_classes(tmp_path, monkeypatch):
    (tmp_path / "counting_models.py").write_text(
        "import keras\ndef needs(num_outputs, input_shape): return keras.Sequential([keras.Input(input_shape),"
        " keras.layers.Dense(num_outputs)])\ndef has_one(input_shape, num_outputs=7): return needs(num_outputs,"
        " input_shape)\ndef decides(input_shape, num_outputs): return needs(num_outputs or 1, input_shape)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = tf.TensorSpec([8], tf.float32)
    with pytest.raises(
        ConfigError,
        match=(
            r"counting_models.py:2, in needs: .*It was given num_outputs=None, because --source does not give .*"
            r" --model_args=num_outputs=10"
        ),
    ):
        build_model(ModelConfig(model="counting_models:needs"), spec, None)
    for name, options, outputs in (("needs", "num_outputs=3", 3), ("has_one", "", 7), ("decides", "", 1)):
        assert (
            build_model(ModelConfig(model=f"counting_models:{name}", model_args=options), spec, None)
            .outputs[0]
            .shape[-1]
            == outputs
        )


@pytest.mark.parametrize("name", ["my head", "schicht_ü", "a:b", "50%"])
def test_a_name_that_tensorflow_does_not_take_is_a_sentence(name, monkeypatch):
    def named(num_outputs):
        return keras.Sequential(
            [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(num_outputs, name=name)]
        )

    monkeypatch.setattr("tests.unit.models.test_build_model.named", named, raising=False)
    with pytest.raises(ConfigError, match=f"called '{name}': give it a name of only ASCII letters"):
        build(f"{__name__}:named", "")
