"""FusedAdam against Keras' own Adam."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.config import OptimizerConfig
from tfdist.control.exit_codes import ConfigError
from tfdist.training.optimizer import (
    FusedAdam,
    check_decays,
    ema_variables,
    make_optimizer,
    rule_of,
    switch_off_reduction,
    unused_parts,
)
from tfdist.training.schedule import Schedule

OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.01},
    "betas": {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-3},
    "average": {"use_ema": True, "ema_momentum": 0.9},
    "schedule": {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)},
    "amsgrad": {"amsgrad": True},
}


def trained(kind, options, starts, steps=20, dtype="float32"):
    """Weights and state after `steps` updates of variables that begin as `starts`, which also make the gradients."""
    variables = [keras.Variable(start, dtype=dtype) for start in starts]
    optimizer = switch_off_reduction(kind(**{"learning_rate": 0.1, **options}))
    optimizer.build(variables)
    step = tf.function(
        lambda gradients: optimizer.apply([tf.cast(gradient, dtype) for gradient in gradients], variables),
        autograph=False,
    )
    for number in range(steps):
        step([tf.constant(start * np.cos(number + start, dtype=np.float32)) for start in starts])
    return [keras.ops.convert_to_numpy(value) for value in (*variables, *optimizer.variables)]


def starts(*sizes):
    random = np.random.default_rng(0)
    return [random.standard_normal(size).astype(np.float32) for size in sizes]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_is_the_adam_of_keras(options):
    ours, theirs = (trained(kind, options, starts((5, 7), 3)) for kind in (FusedAdam, keras.optimizers.Adam))
    for own, other in zip(ours, theirs, strict=True):
        # Of 1 - beta_2, TensorFlow's operation has the float32 next to 1 - float32(beta_2), which is 1.3e-5 of it off
        # Keras' own.
        np.testing.assert_allclose(own, other, rtol=2e-5, atol=1e-5)


def test_it_is_the_formula():
    """In float64, with the same gradients.

    Of Keras' own Adam, which mixes 1 - 0.999 and 1 - float32(0.999)^t, this is 6.5e-6 off.
    """
    (start,) = starts(40)
    b1, b2, w, m, v = float(np.float32(0.9)), float(np.float32(0.999)), start.astype(np.float64), 0.0, 0.0
    for number in range(20):
        g = (start * np.cos(number + start, dtype=np.float32)).astype(np.float64)
        m, v = m + (g - m) * (1 - b1), v + (g * g - v) * (1 - b2)
        w -= 0.1 * np.sqrt(1 - b2 ** (number + 1)) / (1 - b1 ** (number + 1)) * m / (np.sqrt(v) + 1e-7)
    np.testing.assert_allclose(trained(FusedAdam, {}, [start])[0], w, rtol=0, atol=1e-6)


def test_other_types_are_left_to_keras():
    ours, theirs = (trained(kind, {}, starts(6), dtype="bfloat16") for kind in (FusedAdam, keras.optimizers.Adam))
    for own, other in zip(ours, theirs, strict=True):
        assert np.array_equal(own, other)


@pytest.mark.parametrize("cut", [1, 7, 8, 50])
def test_a_piece_is_updated_as_in_the_whole(cut):
    """Bit for bit: ZeRO and parameter servers share variables out wherever they like."""
    (whole,) = starts(103)
    together = trained(FusedAdam, {}, [whole])
    apart = trained(FusedAdam, {}, [whole[:cut], whole[cut:]])
    assert np.array_equal(together[0], np.concatenate(apart[:2]))


def test_the_update_of_replicas_is_one_operation():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        variable = keras.Variable(np.ones(4, np.float32))
        optimizer = switch_off_reduction(FusedAdam(0.1))
        optimizer.build([variable])

    @tf.function(autograph=False)
    def step():
        strategy.run(lambda: optimizer.apply([tf.ones(4)], [variable]))

    kinds = [
        operation.type
        for function in (
            step.get_concrete_function().graph,
            *(each.graph for each in step.get_concrete_function().graph._functions.values() if hasattr(each, "graph")),
        )
        for operation in function.get_operations()
    ]
    step()
    np.testing.assert_allclose(variable, np.full(4, 0.9), rtol=1e-5)
    assert kinds.count("ResourceApplyAdam") == 1 and "Sqrt" not in kinds


@pytest.mark.parametrize(
    ("optimizer", "options", "words"),
    [
        ("adamw", "beta_1=abc", "beta_1=abc must be a number of at least 0 and below 1"),
        ("adamw", "beta_1=None", "beta_1=None must be a number"),
        ("adamw", "beta_2=1.5", "beta_2=1.5 must be a number of at least 0 and below 1"),
        ("sgd", "momentum=-1", "momentum=-1 must be"),
        ("lion", "beta_1=True", "beta_1=True must be"),
        ("adam", "epsilon=-1", "epsilon=-1 must be a number of at least 0; without the option it is 1e-07"),
    ],
)
def test_options_that_are_no_numbers(optimizer, options, words):
    with pytest.raises(ConfigError, match=words):
        make_optimizer(
            OptimizerConfig(optimizer=optimizer, optimizer_args=options), Schedule("constant", 0.1, 0, 10, 0.1, 0.0)
        )


def test_a_whole_number_is_one():
    config = OptimizerConfig(optimizer="adamw", optimizer_args="beta_1=0")
    assert make_optimizer(config, Schedule("constant", 0.1, 0, 10, 0.1, 0.0)).beta_1 == 0.0


@pytest.mark.parametrize(
    ("optimizer", "dtype", "sentence"),
    [
        (rule_of("adam")(), "bfloat16", "beta_2=0.999 is 1 in bfloat16, .*mixed_bfloat16"),
        (
            rule_of("lamb")(),
            "bfloat16",
            "it would never change.* --optimizer_args=beta_2=0.99",
        ),
        (rule_of("sgd")(use_ema=True, ema_momentum=0.9999), "float16", "--ema=0.9999 is 1 in float16.*average"),
        (rule_of("adam")(beta_2=0.99), "bfloat16", ""),
        (rule_of("adam")(use_ema=True, ema_momentum=0.9999), "float32", ""),
        (rule_of("lion")(), "bfloat16", ""),
        (rule_of("muon")(), "bfloat16", "^adam_beta_2=0.999 is 1 in bfloat16.* --optimizer_args=adam_beta_2=0.99"),
        (rule_of("muon")(adam_beta_2=0.99), "bfloat16", ""),
    ],
)
def test_a_decay_that_is_one_in_the_type_of_a_variable_is_refused(optimizer, dtype, sentence):
    """And only where the variable would really not change."""
    variable = keras.Variable([1.0, 2.0], dtype=dtype)
    with pytest.raises(ConfigError, match=sentence) if sentence else contextlib.nullcontext():
        check_decays(optimizer, [variable])
    optimizer.learning_rate = 0.1
    optimizer.build([variable])
    optimizer.apply([keras.ops.ones((2,), dtype)], [variable])
    assert (variable.numpy() != [1.0, 2.0]).all() == (not sentence or optimizer.use_ema)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_muon_is_for_matrices_of_float32(dtype):
    """Keras computes its update in float32, and fails when the step is traced."""
    matrix, vector = keras.Variable(np.eye(2), dtype=dtype), keras.Variable(np.ones(2), dtype="float64")
    with pytest.raises(ConfigError, match=f"--optimizer=muon cannot update .* which is {dtype}"):
        check_decays(keras.optimizers.Muon(), [matrix])
    optimizer = make_optimizer(OptimizerConfig(optimizer="muon"), Schedule("constant", 0.1, 0, 10, 0.1, 0.0))
    optimizer.build([matrix])
    with pytest.raises(tf.errors.InvalidArgumentError, match="Mul"):  # TypeError in a tf.function
        optimizer.apply([keras.ops.ones((2, 2), dtype)], [matrix])
    check_decays(keras.optimizers.Muon(), [vector, keras.Variable(np.eye(2), dtype="float32")])


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_muons_rules_are_those_of_adam_for_tables(dtype):
    table = keras.Variable(np.ones([2, 2]), dtype=dtype, name="embeddings")
    for optimizer in (keras.optimizers.Muon(0.1), keras.optimizers.Muon(0.1, adam_beta_2=0.99)):
        table.assign(np.ones([2, 2]))
        is_refused = dtype == "bfloat16" and optimizer.adam_beta_2 == 0.999
        with pytest.raises(ConfigError, match="adam_beta_2") if is_refused else contextlib.nullcontext():
            check_decays(optimizer, [table])
        optimizer.build([table])
        optimizer.apply([keras.ops.ones((2, 2), dtype)], [table])
        assert (table.numpy() != 1).all() == (not is_refused)


@pytest.mark.parametrize("kind", [FusedAdam, keras.optimizers.SGD])
def test_averages_are_there_from_the_first_update_on(kind):
    """Keras makes them as zeros: an evaluation before (all steps were skipped) would be one of a model of zeros."""
    weight = keras.Variable([2.0, 3.0])
    optimizer = kind(learning_rate=0.1, use_ema=True)
    optimizer.build([weight])
    assert ema_variables(optimizer) == []
    optimizer.apply([tf.constant([1.0, 1.0])], [weight])
    np.testing.assert_allclose(ema_variables(optimizer)[0], weight)


def test_replicas_have_averages_too():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        weight = keras.Variable([2.0, 3.0])
        optimizer = switch_off_reduction(keras.optimizers.SGD(0.1, use_ema=True))
        optimizer.build([weight])
    assert ema_variables(optimizer) == []
    strategy.run(tf.function(lambda: optimizer.apply([tf.constant([1.0, 1.0])], [weight])))
    np.testing.assert_allclose(ema_variables(optimizer)[0].numpy(), [1.9, 2.9])


class Inner(keras.layers.Layer):
    """A layer of whose inner layers TensorFlow's names of variables say nothing."""

    def __init__(self):
        super().__init__(name="debias")
        self.inner = keras.layers.Dense(2, name="head.a")

    def call(self, x):
        return self.inner(x)


def decayed(**flags):
    """The paths of the variables that a step without gradients makes smaller -> what is left of them."""
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(5, 4, name="table"),
            keras.layers.LayerNormalization(name="norm"),
            Inner(),
        ],
        name="beta_vae",
    )
    optimizer = make_optimizer(OptimizerConfig(**flags), Schedule("constant", 0.1, 0, 10, 0.1, 0.0))
    optimizer.build(model.trainable_variables)
    for variable in model.trainable_variables:
        variable.assign(np.ones(variable.shape, np.float32))
    optimizer.apply([tf.zeros(variable.shape) for variable in model.trainable_variables])
    left = {
        variable.path.removeprefix("beta_vae/"): float(variable.numpy().flat[0])
        for variable in model.trainable_variables
    }
    return {path: round(value, 6) for path, value in left.items() if value != 1}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        ("bias,gamma,beta", "table/embeddings debias/head.a/kernel"),
        ("bias, gamma ,beta,", "table/embeddings debias/head.a/kernel"),
        ("head.a", "table/embeddings norm/gamma norm/beta"),
        ("head_a,h.*a", "table/embeddings norm/gamma norm/beta debias/head.a/kernel debias/head.a/bias"),
        ("a/kernel,norm", "table/embeddings debias/head.a/bias"),
        ("", "table/embeddings norm/gamma norm/beta debias/head.a/kernel debias/head.a/bias"),
    ],
)
def test_what_is_left_out_of_weight_decay(optimizer, exclude, left):
    found = decayed(optimizer=optimizer, weight_decay=0.5, weight_decay_exclude=exclude)
    assert found == dict.fromkeys(left.split(), 0.95)


def test_parts_of_no_name_are_told():
    variables = [keras.Variable([1.0], name="kernel"), keras.Variable([1.0], name="head")]
    config = OptimizerConfig(weight_decay=0.1, weight_decay_exclude="bias,head,h.*d, heads")
    warnings = unused_parts(config, variables)
    assert [warning.split(": ")[1].split(" is in no")[0] for warning in warnings] == ["h.*d", "heads"]
    assert unused_parts(OptimizerConfig(weight_decay_exclude="heads"), variables) == []
    assert unused_parts(OptimizerConfig(weight_decay=0.1), variables) == []


def test_muon_decays_all_that_it_trains_alike():
    """Keras' Muon has another rate for what it trains by Adam, which is 0.004 if nothing is said."""
    assert decayed(optimizer="muon") == {}
    others = {"table/embeddings": 0.98, "debias/head.a/kernel": 0.95}
    assert decayed(optimizer="muon", weight_decay=0.5, optimizer_args="adam_weight_decay=0.2") == others
    assert decayed(optimizer="muon", optimizer_args="adam_weight_decay=0.2") == {"table/embeddings": 0.98}
