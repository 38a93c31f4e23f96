"""What tfdist.train should compute, written without tfdist: a plain loop in one process, with Keras' own losses and
optimizers and NumPy.

It runs eagerly, so that nothing is traced: in float32 or, to see how much rounding matters, entirely in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.fuzz import data, keras_settings, models, space
from tests.fuzz.data_order import batch_sizes
from tests.fuzz.layers import SumInEvaluation, SumLoss

LAST_PLACE = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # by the type of the computation
MORE = 6  # runs in the precision of the case with perturbed weights
ADAM = ("adam", "adamw", None)
POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}


class Reference:
    """One run of a case."""

    def __init__(
        self,
        case: Mapping[str, Any],
        double: bool = False,
        turned: bool = False,
        shaken: int = 0,
        coarse: bool = False,
        travelling: int = 0,
    ):
        """turned: takes the rows of each micro-batch in reverse, which changes nothing but the rounding. shaken: if
        above 0, the seed of perturbations of the weights in the last place of the type, at the start and after each
        step. coarse: Adam's 0.9 and 0.999 have their float32 values, so that 1 - 0.999 is rounded as in float32.
        travelling: if above 0, the seed of the order in which the gradients of the workers' rows are added up; each sum
        is rounded to the type of --compression. Workers whose gradients nearly cancel lose more than the last places of
        their sum."""
        self.coarse, self.travelling = coarse, travelling
        self.case, self.options, self.double, self.turned = case, case["options"], double, turned
        keras_settings.forget_names()
        keras.config.set_floatx("float32")
        initial = self._model(False)
        self.float = "float64" if double else "float32"
        if double:
            keras.config.set_floatx("float64")
            self.model = self._model(True)
            for variable, value in zip(self.model.variables, initial.variables, strict=True):
                variable.assign(tf.cast(value.value, variable.dtype))
        else:
            self.model = initial
        self.random = np.random.default_rng(shaken) if shaken else None
        self._shake()
        self.optimizer = self._optimizer()
        self.optimizer.build(self.model.trainable_variables)
        self.parts = data.arrays(case)
        self.masked = self.options.get("objective") == space.MASKED
        self.idle: set[int] = set()  # indices of weights on which nothing depends
        self.scale = (
            float(self.options.get("loss_scale_initial", 32768.0))
            if self.options.get("precision") == "float16"
            else 1.0
        )

    def _model(self, double: bool) -> keras.Model:
        keras_settings.seed(self.options.get("seed", 0))
        keras.config.set_dtype_policy("float64" if double else POLICIES[self.options.get("precision", "float32")])
        return models.build(self.case["model"], double)

    def _optimizer(self) -> keras.optimizers.Optimizer:
        options, kind = self.options, self.options.get("optimizer", "adamw")
        arguments: dict[str, Any] = {
            "learning_rate": options["learning_rate"],
            "weight_decay": options.get("weight_decay") or None,
        }
        if self.coarse:
            arguments |= {"beta_1": float(np.float32(0.9)), "beta_2": float(np.float32(0.999))}
        if options.get("ema"):
            arguments |= {"use_ema": True, "ema_momentum": options["ema"], "ema_overwrite_frequency": None}
        make = {
            "sgd": keras.optimizers.SGD,
            "momentum": keras.optimizers.SGD,
            "adam": keras.optimizers.Adam,
            "adamw": keras.optimizers.Adam,
            "lion": keras.optimizers.Lion,
            "lamb": keras.optimizers.Lamb,
            "adafactor": keras.optimizers.Adafactor,
        }[kind]
        parts = [part for part in options.get("weight_decay_exclude", "bias,gamma,beta").split(",") if part]

        def kept(variable: keras.Variable) -> bool:  # as it is, by weight decay
            whole, own = variable.path, variable.path.split("/")[-1]
            return any(part in (own if part in ("bias", "gamma", "beta") else whole) for part in parts)

        optimizer = make(**arguments, **({"momentum": 0.9} if kind == "momentum" else {}))
        optimizer.exclude_from_weight_decay(var_list=[each for each in self.model.trainable_variables if kept(each)])
        return optimizer

    # -- a run -----------------------------------------------------------------------------------------------------

    def run(self, order: np.ndarray) -> dict[str, np.ndarray]:
        """Trains and returns name -> array. order: the samples of all steps, one after the other."""
        sizes, first = batch_sizes(self.case), 0
        found: dict[str, np.ndarray] = {}
        norm, skipped, step = 0.0, 0, 0
        for call, count in enumerate(self.case["calls"]):
            sums = np.zeros(2)
            for _ in range(count):
                loss, weight, norm, finite = self._step(order[first : first + sizes[step]], step)
                first, step = first + sizes[step], step + 1
                skipped += not finite
                sums += [loss, weight] if finite or not self._may_skip else 0
            found[f"loss/{call}"] = np.array(sums[0] / sums[1] if sums[1] else np.nan)
            found[f"norm/{call}"] = np.array(norm)
        found["skipped"] = np.array(float(skipped))
        found |= {
            f"model/{index:04d}": variable.numpy().astype("float64")
            for index, variable in enumerate(once(self.model.variables))
            if is_number(variable)
        }
        return found | (self._evaluate() if self.case.get("evaluate", True) else {})

    def _step(self, rows: np.ndarray, step: int) -> tuple[float, float, float, bool]:
        """Returns (sum of losses, sum of weights, norm, whether all was finite)."""
        # A loss such as a maximum over rows cannot be added up from parts of the rows.
        accumulation = (
            1 if set(models.NO_SUMS) & set(space.flat_blocks(self.case)) else self.options.get("accumulation", 1)
        )
        before = [variable.value.numpy() for variable in self.model.non_trainable_variables]
        total, gradients, loss_sum = self._weight(rows), None, 0.0
        for micro in range(accumulation):
            own = rows[micro * len(rows) // accumulation : (micro + 1) * len(rows) // accumulation]
            grads, loss = self._micro(own[::-1] if self.turned else own, total, len(rows))
            gradients = grads if gradients is None else [a + b for a, b in zip(gradients, grads, strict=True)]
            loss_sum += loss
        gradients = [gradient / tf.cast(self.scale, gradient.dtype) for gradient in gradients]
        norm = math.sqrt(sum(float(tf.reduce_sum(tf.square(tf.cast(gradient, tf.float64)))) for gradient in gradients))
        finite = math.isfinite(norm) and math.isfinite(loss_sum)
        if finite or not self._may_skip:
            clip = self.options.get("clip_norm", 0.0)
            factor = clip / norm if clip and norm > clip else 1.0
            self.optimizer.learning_rate = self._learning_rate(int(self.optimizer.iterations.numpy()))
            self.optimizer.apply(
                [
                    None if place in self.idle else gradient * tf.cast(factor, gradient.dtype)
                    for place, gradient in enumerate(gradients)
                ],
                self.model.trainable_variables,
            )
            self._shake()
        else:
            for variable, value in zip(self.model.non_trainable_variables, before, strict=True):
                variable.assign(value)
            self.scale /= 2 if self.options.get("precision") == "float16" else 1
        return loss_sum, total, norm, finite

    def _shake(self) -> None:
        if self.random is not None:
            shake(self.model, self.random, self.options.get("precision", "float32"))

    @property
    def _may_skip(self) -> bool:
        return self.options.get("on_nan") == "skip" or self.options.get("precision") == "float16"

    def _weight(self, rows: np.ndarray) -> float:
        """Returns the sum of all weights of a batch."""
        if self.masked:
            return float(np.count_nonzero(self.parts[1][rows]))
        per_row = models.LENGTH if self.case["model"]["head"] == "tokens" else 1
        if len(self.parts) < 3:
            return float(len(rows) * per_row)
        weights = self.parts[2][rows].astype("float64")
        return float(weights.sum() * (per_row if weights.ndim == 1 else 1))

    def _micro(self, rows: np.ndarray, total: float, count: int) -> tuple[list[tf.Tensor], float]:
        """Returns (gradients, sum of losses) of some of the `count` rows of a batch, whose weights sum to `total`.

        Losses that layers add have no weights: means count by their rows, sums add up.
        """
        x, y, w = self._batch(self.parts, rows)
        with tf.GradientTape(persistent=True) as tape:
            losses, weights, _ = self._scores(self.model(x, training=True), y, w)
            loss = tf.reduce_sum(losses * weights)
            # A model that withholds `training` computes as in evaluation.
            kinds = (SumLoss, SumInEvaluation) if self.case["model"].get("withheld") else SumLoss
            sums = self._added(layer for layer in self.model._flatten_layers() if isinstance(layer, kinds))
            means = (
                tf.add_n([tf.reduce_sum(tf.cast(term, self.float)) for term in self.model.losses]) - sums
                if self.model.losses
                else tf.zeros([], self.float)
            )
            whole = (loss / total + means * (len(rows) / count) + sums if total else 0.0 * loss) * tf.cast(
                self.scale, self.float
            )
            parts = self._parts(whole, losses * weights, total) if self.travelling else [whole]
        variables = [variable.value for variable in self.model.trainable_variables]
        found = [tape.gradient(part, variables) for part in parts]
        self.idle = {place for place in range(len(variables)) if all(gradients[place] is None for gradients in found)}
        gradients = [
            [
                tf.zeros_like(variable) if gradient is None else tf.convert_to_tensor(gradient)
                for gradient, variable in zip(gradients, variables, strict=True)
            ]
            for gradients in found
        ]
        return self._added_up(gradients) if self.travelling else gradients[0], float(loss)

    def _parts(self, whole: tf.Tensor, losses: tf.Tensor, total: float) -> list[tf.Tensor]:
        """Returns the part of each worker's rows in `whole`; the last part is the rest, with the losses of layers."""
        workers, rows = space.replicas_of(self.case["runtime"], self.options), len(losses)
        cuts = [worker * rows // workers for worker in range(workers)]
        scale = tf.cast(self.scale / total if total else 0.0, self.float)
        first = [tf.reduce_sum(losses[a:b]) * scale for a, b in zip(cuts, cuts[1:], strict=False)]
        return [*first, whole - tf.add_n(first)] if first else [whole]

    def _added_up(self, gradients: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        """Returns the sum over workers of each gradient, rounded each time it travels from one worker to the next."""
        kind = {"bf16": tf.bfloat16, "fp16": tf.float16}[self.options["compression"]]
        order = np.random.default_rng(self.travelling).permutation(len(gradients))
        sums = [tf.zeros_like(gradient) for gradient in gradients[0]]
        for worker in order:
            sums = [
                tf.cast(tf.cast(total + gradient, kind), total.dtype)
                for total, gradient in zip(sums, gradients[worker], strict=True)
            ]
        return sums

    def _added(self, layers) -> tf.Tensor:
        terms = [tf.reduce_sum(tf.cast(term, self.float)) for layer in layers for term in layer.losses]
        return tf.add_n(terms) if terms else tf.zeros([], self.float)

    def _batch(self, parts: tuple, rows: np.ndarray) -> tuple:
        def take(part: Any) -> Any:
            if isinstance(part, dict):
                return {name: take(value) for name, value in part.items()}
            value = part[rows]
            return tf.constant(value, self.float if value.dtype.kind == "f" else None)

        x, y, *w = (take(part) for part in parts)
        return x, y, w[0] if w else tf.ones([len(rows)], self.float)

    def _scores(self, outputs: Any, y: Any, w: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, dict[str, tf.Tensor]]:
        """Returns (losses, weights of the same shape, metrics)."""
        if "output" in self.case["model"].get("named", ()):
            outputs, y = outputs[models.ONLY], y[models.ONLY]
        outputs = tf.nest.map_structure(lambda output: tf.cast(output, self.float), outputs)

        def entropy(y: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
            smoothing, classes = self.options.get("label_smoothing", 0.0), logits.shape[-1]
            target = tf.one_hot(y, classes, dtype=logits.dtype) * (1 - smoothing) + smoothing / classes
            return keras.losses.categorical_crossentropy(target, logits, from_logits=True)

        def squared(y: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
            return tf.reduce_mean(tf.square(value - y), -1)

        head = self.case["model"]["head"]
        if head == "dict":
            size = squared(y["size"], outputs["size"])
            losses, metrics = entropy(y["kind"], outputs["kind"]) + 0.5 * size, {"size_error": size}
        elif head == "values":
            losses, metrics = squared(y, outputs), {"absolute_error": tf.reduce_mean(tf.abs(outputs - y), -1)}
        else:
            right = tf.equal(tf.argmax(outputs, -1), tf.cast(y, tf.int64))
            losses, metrics = entropy(y, outputs), {"accuracy": tf.cast(right, self.float)}
        if self.masked:
            return losses, tf.cast(y != 0, self.float), metrics
        return (
            losses,
            tf.broadcast_to(w if w.shape.rank == losses.shape.rank else w[:, tf.newaxis], losses.shape),
            metrics,
        )

    def _learning_rate(self, step: int) -> float:
        """Returns the rate by the schedules of docs/model_and_data.md."""
        options, peak = self.options, self.options["learning_rate"]
        shape, warmup, end = (
            options.get("schedule", "constant"),
            options.get("warmup_steps", 0),
            sum(self.case["calls"]),
        )
        if step < warmup:
            return peak * (step + 1) / warmup
        start = max(warmup, round(end * 0.9)) if shape == "wsd" else warmup
        progress = min(max((step - start) / max(end - start, 1), 0.0), 1.0)
        return (
            peak
            * {
                "constant": 1.0,
                "linear": 1 - progress,
                "wsd": 1 - progress,
                "cosine": (1 + math.cos(math.pi * progress)) / 2,
            }[shape]
        )

    def _evaluate(self) -> dict[str, np.ndarray]:
        if self.options.get("ema"):
            for variable, average in zip(
                self.model.trainable_variables, self.optimizer._model_variables_moving_average, strict=True
            ):
                variable.assign(average.value)
        # If rows of a batch depend on each other, the batches must be those of one device.
        rows = data.EVAL_BATCH if models.MIXING & set(space.flat_blocks(self.case)) else data.EVAL_SIZE
        sums: dict[str, float] = {}
        for first in range(0, data.EVAL_SIZE, rows):
            places = np.arange(first, min(first + rows, data.EVAL_SIZE))
            x, y, w = self._batch(data.arrays(self.case, "eval"), places)
            losses, weights, metrics = self._scores(self.model(x, training=False), y, w)
            for name, value in {"loss": losses, **metrics, "weight": tf.ones_like(weights)}.items():
                sums[name] = sums.get(name, 0.0) + float(tf.reduce_sum(tf.where(weights > 0, value * weights, 0)))
        weight = sums.pop("weight")
        return {f"eval/{name}": np.array(total / weight) for name, total in sums.items()}


def shake(model: keras.Model, random: np.random.Generator, precision: str) -> None:
    """Perturbs weights as much as rounding to the type of the computation does."""
    for variable in model.trainable_variables:
        value = variable.numpy()
        variable.assign(value * (1 + random.normal(size=value.shape) * LAST_PLACE[precision]))


def once(variables: list) -> list:
    return list({id(variable): variable for variable in variables}.values())


def is_number(variable: keras.Variable) -> bool:
    """False for the state of a seed generator, which tfdist derives again in each step."""
    return keras.backend.is_float_dtype(variable.dtype)


def runs(kind: str, case: Mapping[str, Any], order: np.ndarray) -> list[dict[str, np.ndarray]]:
    """kind: "double", the run in float64; "single", the run in the precision of the case; "some" and "more", runs that
    differ from these by rounding alone."""
    ways = {
        "double": [{"double": True}],
        "single": [{}],
        "some": [{"turned": True}, *({"double": True, "shaken": seed} for seed in (1, 2, 3))],
        # A gradient that is 0 but for rounding stays 0 in float64: only runs in float32 show what float32 makes of it.
        "more": [{"shaken": seed, "turned": seed % 2 == 0} for seed in range(4, 4 + MORE)]
        + ([{"double": True, "coarse": True}] if case["options"].get("optimizer") in ADAM else []),
    }[kind]
    if kind == "some" and case["options"].get("compression") in ("bf16", "fp16"):
        ways += [{"double": True, "travelling": seed} for seed in (1, 2, 3, 4)]
    with keras_settings.restored(), keras_settings.sums_of_numpy():
        return [Reference(case, **how).run(order) for how in ways]
