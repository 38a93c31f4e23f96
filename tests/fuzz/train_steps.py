"""Models with a train_step of their own, as users of tfdist.fit write them."""

from __future__ import annotations

import keras
import tensorflow as tf


class _Own(keras.Model):
    def parts(self, data):
        x, y, w = keras.utils.unpack_x_y_sample_weight(data)
        return x, y, w

    def apply(self, tape, loss):
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, [variable.value for variable in variables]), variables)

    def told(self, loss):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
        return {"loss": loss}


class GradientPenalty(_Own):
    """Gradients with respect to the inputs enter the loss."""

    def train_step(self, data):
        x, y, w = self.parts(data)
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self(x, training=True)
                value = tf.reduce_sum(tf.square(outputs))
            penalty = tf.reduce_mean(tf.square(tf.reduce_sum(tf.square(inner.gradient(value, x)), -1)))
            loss = self.compute_loss(x, y, outputs, w) + 0.01 * penalty
        self.apply(tape, loss)
        return self.told(loss)


class Adversarial(_Own):
    """Trains on inputs that were moved along the gradient of the loss (not along its sign)."""

    def train_step(self, data):
        x, y, w = self.parts(data)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = self.compute_loss(x, y, self(x, training=True), w)
        x = x + 0.3 * inner.gradient(loss, x)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), w)
        self.apply(tape, loss)
        return self.told(loss)


class TwoUpdates(_Own):
    """One scaled loss, two updates."""

    def train_step(self, data):
        x, y, w = self.parts(data)
        variables = self.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs, w)
            scaled = self.optimizer.scale_loss(loss)
            second = 0.5 * loss
        values = [variable.value for variable in variables]
        self.optimizer.apply(tape.gradient(scaled, values), variables)
        self.optimizer.apply(tape.gradient(second, values), variables)
        return self.told(loss)


class TwoCalls(_Own):
    """Calls the model on two batches in one step; the loss is the mean of both losses."""

    def train_step(self, data):
        x, y, w = self.parts(data)
        with tf.GradientTape() as tape:
            first = self.compute_loss(x, y, self(x, training=True), w)
            loss = 0.5 * (first + self.compute_loss(x, y, self(0.5 * x, training=True), w))
        self.apply(tape, loss)
        return self.told(loss)


class WeightsInTheLoss(_Own):
    """The loss uses the weights directly, in addition to the outputs."""

    def train_step(self, data):
        x, y, w = self.parts(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), w)
            loss += 0.01 * tf.add_n([tf.reduce_sum(tf.square(variable.value)) for variable in self.trainable_variables])
        self.apply(tape, loss)
        return self.told(loss)


class OwnOutput(_Own):
    """Calls the model again on its own output."""

    def train_step(self, data):
        x, y, w = self.parts(data)
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            outputs = self(tf.cast(tf.concat([outputs, outputs], -1), x.dtype), training=True)
            loss = self.compute_loss(x, y, outputs, w)
        self.apply(tape, loss)
        return self.told(loss)


class Noisy(_Own):
    """Draws random numbers for all rows from a generator that each worker seeds differently, like a generator without a
    seed: all workers must draw the chief's numbers.
    """

    rank = 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.generator = keras.random.SeedGenerator(3 + Noisy.rank)

    def drawn_from(self):
        return self.generator

    def train_step(self, data):
        x, y, w = self.parts(data)
        one, other = (
            tf.cast(keras.random.normal(tf.shape(x), dtype="float32", seed=self.drawn_from()), x.dtype)
            for _ in range(2)
        )
        x = x + (
            0.2 * one + 0.1 * tf.sign(x) + 0.2 * other
        )  # the order in which TensorFlow adds these differs between processes
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), w)
        self.apply(tape, loss)
        return self.told(loss)


class NoisyElsewhere(Noisy):
    """Like Noisy, but the generator is not part of the model."""

    generators: list = []  # of the newest model

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        NoisyElsewhere.generators[:] = [keras.random.SeedGenerator(7 + Noisy.rank)]

    def drawn_from(self):
        return NoisyElsewhere.generators[0]


class Relabelled(_Own):
    """Metrics get other labels than the data has; these labels decide which kind of accuracy is meant."""

    def train_step(self, data):
        x, y, w = self.parts(data)
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs, w)
        self.apply(tape, loss)
        return self.told(loss) | self.compute_metrics(x, tf.one_hot(y, 3), outputs, w)

    def test_step(self, data):
        x, y, w = self.parts(data)
        outputs = self(x, training=False)
        loss = self.compute_loss(x, y, outputs, w, training=False)
        return self.told(loss) | self.compute_metrics(x, tf.one_hot(y, 3), outputs, w)


class KeptInTheLoss(_Own):
    """The loss uses what layers keep of their last call in lists and dicts (layers.KeptLoss)."""

    def train_step(self, data):
        x, y, w = self.parts(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), w)
            loss += sum(tf.cast(layer.divergence(), loss.dtype) for layer in self.layers if hasattr(layer, "kept"))
        self.apply(tape, loss)
        return self.told(loss)


class TwoOptimizers(_Own):
    """Like a GAN: an optimizer that is not the compiled one updates some of the weights."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.second = keras.optimizers.Adam(0.02)
        self.second.build(self.trainable_variables[len(self.trainable_variables) // 2 :])

    def train_step(self, data):
        x, y, w = self.parts(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True), w)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        middle = len(variables) // 2
        self.optimizer.apply(gradients[:middle], variables[:middle])
        self.second.apply(gradients[middle:], variables[middle:])
        return self.told(loss)


class InnerModel(_Own):
    """Calls an inner model instead of itself, as keras.io's autoencoders and GANs do."""

    def __init__(self, inputs, outputs, **options):
        super().__init__(inputs, outputs, **options)
        self.inner = keras.Model(inputs, outputs)

    def train_step(self, data):
        x, y, w = self.parts(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self.inner(x, training=True), w)
        self.apply(tape, loss)
        return self.told(loss)
