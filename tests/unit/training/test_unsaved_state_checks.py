"""What a step sets and draws, and no snapshot would hold: refused, or told."""

import collections
import functools

import keras
import pytest
import tensorflow as tf

from tests.unit.training.test_step import batches, make_step
from tfdist.artifacts.hidden_state import hidden_variables
from tfdist.control.exit_codes import ConfigError
from tfdist.training import unsaved_state_checks
from tfdist.training.objectives import classification


class Holds:
    """Called with anything, it counts."""

    def __init__(self, make=lambda: tf.Variable(0.0, trainable=False, name="calls")):
        self.calls = make()

    def __call__(self, x):
        self.calls.assign_add(0.1)
        return x * (1.0 + tf.cast(self.calls, x.dtype))

    def called(self, x):
        return self(x)


class Deep:
    """In a tf.Module, in a deque, in a slot."""

    __slots__ = ("inside",)

    def __init__(self):
        module = tf.Module()
        module.held = Holds()
        self.inside = collections.deque([module])

    def __call__(self, x):
        return self.inside[0].held(x)


class Grows(Holds, keras.constraints.Constraint):
    pass


class Anneals(Holds, keras.regularizers.Regularizer):
    def __call__(self, x):
        return tf.reduce_sum(super().__call__(x) ** 2)


class Constrained(keras.layers.Layer):
    """Its constraint is an attribute of the variable alone."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4), constraint=Grows())

    def call(self, x):
        return x @ self.kernel


class Draws(keras.constraints.Constraint):
    def __init__(self, seed=None):
        self.seed = seed

    def __call__(self, weight):
        return weight + 0.1 * keras.random.normal(weight.shape, seed=self.seed)


class Penalises(keras.regularizers.Regularizer):
    def __call__(self, weight):
        return tf.reduce_sum(weight * keras.random.normal(weight.shape))


class Counts(keras.layers.Layer):
    """In a metric, which belongs to each worker and to no snapshot."""

    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Sum()

    def call(self, x):
        self.seen.update_state(x)
        return x


def model_of(layer):
    return keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(4)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.layers.Dense(4, Holds()),
        lambda: keras.layers.Dense(4, kernel_regularizer=Anneals()),
        lambda: keras.layers.Dense(4, kernel_constraint=Grows()),
        lambda: keras.layers.Dense(4, Holds(lambda: keras.Variable(0.0, trainable=False, name="calls"))),
        Constrained,
        lambda: keras.layers.Lambda((lambda held: lambda x: held(x))(Holds())),
        lambda: keras.layers.Dense(4, functools.partial(Holds.__call__, Holds())),
        lambda: keras.layers.Dense(4, Holds().called),
        lambda: keras.layers.Dense(4, tf.function(Holds().called)),
        lambda: keras.layers.Dense(4, Deep()),
    ],
)
def test_what_layers_are_made_with_is_looked_at(make):
    model = model_of(make())
    step = make_step(model=model)
    (calls,) = hidden_variables(model)
    step(batches(16), 2)
    assert float(calls.numpy()) == pytest.approx(0.2)


HELD = Holds()


class MadeLate(keras.layers.Layer):
    """In the first step."""

    calls = None

    def call(self, x, training=False):
        if not training:
            return x
        if self.calls is None:
            with tf.init_scope():
                self.calls = tf.Variable(0.0, trainable=False, name="calls")
        return x + self.calls.assign_add(1.0)


def unsaved(how):
    """A model whose steps set what is found nowhere in it before the first."""
    if how == "late":
        return model_of(MadeLate())
    if how == "module":
        return model_of(keras.layers.Lambda(lambda x: HELD(x)))
    if how == "loop":

        def looped(x):
            return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, HELD(x)), (0, x))[1]

        return model_of(keras.layers.Lambda(looped))
    if how == "function":
        return model_of(keras.layers.Lambda(tf.function(lambda x: HELD(x), jit_compile=True)))
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def counted(x):
        with tf.control_dependencies([table.insert(tf.constant([1], tf.int64), tf.constant([1.0]))]):
            return tf.identity(x)

    return model_of(keras.layers.Lambda(counted))


@pytest.mark.parametrize(
    ("how", "options"),
    [
        *((how, {}) for how in ("module", "late", "loop", "function", "table")),
        *((how, {"jit_compile": True}) for how in ("late", "loop")),
        *((how, {"phase_every": 2}) for how in ("module", "table")),
    ],
    ids=str,
)
def test_what_is_unsaved_is_refused(how, options):
    words = "sets a lookup table" if how == "table" else "sets the variable '(.*/)?calls'"
    step = make_step(model=unsaved(how), **options)
    with pytest.raises(ConfigError, match=f"Each step {words}, which was not found in the model"):
        step(batches(16), 1)
    assert int(step.counter.numpy()) == 0


def test_an_objective_with_a_state_is_refused():
    inner, held = classification(), Holds()

    def objective(outputs, y, w):
        return inner(held(outputs), y, w)

    with pytest.raises(ConfigError, match="Each step sets the variable 'calls'"):
        make_step(objective=objective)(batches(16), 1)


def test_metrics_of_layers_are_left_alone():
    step = make_step(model=model_of(Counts()))
    assert step(batches(16), 2).step == 2


@pytest.mark.parametrize("draw", [tf.random.normal, tf.random.uniform, tf.random.truncated_normal])
def test_what_is_drawn_anew_is_told_once_or_refused(draw):
    def model():
        return model_of(keras.layers.Lambda(lambda x: x + draw(tf.shape(x))))

    step, iterators = make_step(model=model()), batches(16)
    assert ["draws by tf.random" in sentence for sentence in step(iterators, 1).news] == [True]
    assert not step(iterators, 1).news
    with pytest.raises(ConfigError, match="--deterministic guarantees .* draw with keras.random"):
        make_step(model=model(), deterministic=True)(batches(16), 1)


def test_what_takes_its_seed_as_an_input_tells_nothing():
    """RandomIndexShuffle, and RandomGammaGrad on the way back."""

    def drawn(x):
        place = tf.random.experimental.index_shuffle(1, [1, 2], 5)
        return x + tf.random.stateless_gamma([6], [1, place], 1.0 + x[0] ** 2)

    net = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6), keras.layers.Lambda(drawn)])
    step = make_step(model=net, deterministic=True)
    assert not step(batches(16), 1).news


def test_generators_and_keras_tell_nothing():
    generator = tf.random.Generator.from_seed(1)

    class Noise(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.generator = generator

        def call(self, x):
            return x + self.generator.normal(tf.shape(x)) + keras.random.normal(tf.shape(x))

    step = make_step(model=model_of(Noise()), generator=True, deterministic=True)
    assert not step(batches(16), 1).news


def test_a_constraint_that_draws_is_refused():
    def step(seed):
        return make_step(model=model_of(keras.layers.Dense(4, kernel_constraint=Draws(seed))), generator=True)

    with pytest.raises(ConfigError, match="A constraint of weights draws with keras.random"):
        step(None)(batches(16), 1)
    assert step(3)(batches(16), 1).step == 1


def test_a_regularizer_draws_by_the_step():
    """The second step draws the same after whatever was drawn before."""

    def third(before):
        model = model_of(keras.layers.Dense(4, kernel_regularizer=Penalises()))
        step, iterators = make_step(model=model, generator=True), batches(16)
        for _ in range(2):
            keras.random.normal([before])
            step(iterators, 1)
        return [weight.tolist() for weight in model.get_weights()]

    assert third(1) == third(1)


def test_what_is_of_the_process_is_known_by_its_name_in_any_scope():
    with tf.name_scope("layer"):
        token, other = tf.Variable(0.0, name="tfdist_order"), tf.Variable(0.0, name="order")
    assert unsaved_state_checks.names_of([token.handle, other.handle]) == ["layer/order"]
