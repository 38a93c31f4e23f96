"""Private parts of Keras' optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdist.compat.temporary_attributes import attribute_replaced
from tfdist.control.exit_codes import UnsupportedError


def built_with_slots(
    optimizer: keras.Optimizer, variables: Sequence[keras.Variable]
) -> list[tuple[keras.Variable, keras.Variable, str]]:
    """Builds the optimizer on `variables`. Returns (slot, the variable that it belongs to, its name) for each slot.
    Relies on `Optimizer.build` making slots with `add_variable_from_reference`; without it optimizer state cannot be
    divided.
    """
    slots = []
    add = optimizer.add_variable_from_reference

    def noted(reference_variable: keras.Variable, name: str | None = None, *rest: Any, **options: Any) -> Any:
        slot = add(reference_variable, name, *rest, **options)
        slots.append((slot, reference_variable, name or "var"))
        return slot

    with attribute_replaced(optimizer, "add_variable_from_reference", noted):
        optimizer.build(variables)
    return slots


def switch_off_reduction(optimizer: keras.Optimizer) -> None:
    """Makes `optimizer.apply` take gradients as they are: they are already summed over replicas. Relies on
    `Optimizer._all_reduce_sum_gradients`, which `apply` calls. Raises UnsupportedError if it is gone; if `apply` no
    longer calls it, gradients are summed twice, and the parity tests with several replicas fail.
    """
    if not callable(getattr(optimizer, "_all_reduce_sum_gradients", None)):
        raise UnsupportedError(f"Keras {keras.__version__} reduces gradients in an unknown way: install keras~=3.15.")
    optimizer._all_reduce_sum_gradients = list


def moving_averages(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """The moving averages of the trainable variables, in their order, if use_ema=True; else an empty list. Relies on
    `Optimizer._model_variables_moving_average`; without it --ema cannot be evaluated."""
    return list(optimizer._model_variables_moving_average) if optimizer.use_ema else []


def update_moving_averages(optimizer: keras.Optimizer) -> None:
    """Updates the moving averages of all trainable variables, if use_ema=True, as `apply` does with each update. Relies
    on `Optimizer._update_model_variables_moving_average` and `_trainable_variables`; without them a run with --ema
    fails where no variable has a gradient."""
    if optimizer.use_ema:
        optimizer._update_model_variables_moving_average(optimizer._trainable_variables)


def built_for(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """The variables that the optimizer was built for; an empty list before. Relies on `Optimizer._trainable_variables`;
    without it no backup of a plain fit is restored into an optimizer that is built in its first step."""
    return list(optimizer._trainable_variables) if optimizer.built else []


def count_steps_atomically(optimizer: keras.Optimizer) -> None:
    """Makes `iterations` count with a single TensorFlow operation: Keras' `assign(self + 1)` loses updates when several
    workers run it at the same time. Relies on `Optimizer._iterations`, and on `apply` calling its `assign_add`; without
    it the asynchronous parameter server counts too few steps.
    """
    iterations = optimizer._iterations
    iterations.assign_add = iterations.value.assign_add


def with_inner(optimizer: keras.Optimizer | None) -> list[keras.Optimizer]:
    """Returns the optimizer and all inside it: the one for which a LossScaleOptimizer scales the loss, those of a
    MultiOptimizer."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return []
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", [])]
    return [optimizer, *(one for each in inner for one in with_inner(each))]


def learning_rate_variable(optimizer: keras.Optimizer) -> keras.Variable | None:
    """The variable of a learning rate that can be set; None if there is none, as with a schedule. An optimizer around
    others has one that it does not use. Relies on `Optimizer._learning_rate`; without it a callback's change on one
    worker is not adopted by the others.
    """
    rate = getattr(optimizer, "_learning_rate", None)
    return rate if isinstance(rate, keras.Variable) else None


def choose_decaying(optimizer: keras.Optimizer, decays: Callable[[str], bool]) -> None:
    """Makes `optimizer.apply` decay the variables for whose path in the model `decays` is true. Keras' own
    `exclude_from_weight_decay` looks at TensorFlow's names, where inner layers are missing, and with Muon at the
    variable's own name. Relies on `Optimizer._use_weight_decay`, which `apply` asks, and on `_trainable_variables` and
    `_get_variable_index`. Raises UnsupportedError if the first is gone; if `apply` no longer asks it, all variables
    decay, and tests/unit/training/test_optimizer.py fails.
    """
    if not callable(getattr(optimizer, "_use_weight_decay", None)):
        raise UnsupportedError(f"Keras {keras.__version__} chooses what decays in an unknown way: install keras~=3.15.")

    def use_weight_decay(variable: Any) -> bool:
        return decays(optimizer._trainable_variables[optimizer._get_variable_index(variable)].path)

    optimizer._use_weight_decay = use_weight_decay


def updates_by_muon(optimizer: keras.Optimizer, variable: keras.Variable) -> bool:
    """Whether the optimizer is Muon and updates the variable by its own rule, and not by that of Adam. Relies on
    `Muon._should_use_adamw`; without it a variable that Muon would never change, or cannot update, is not refused."""
    return isinstance(optimizer, keras.optimizers.Muon) and not optimizer._should_use_adamw(variable)


def weights_that_decay(optimizer: keras.Optimizer, weights: Sequence[keras.Variable]) -> list[list[int]]:
    """The indices of the weights that decay, for each optimizer with weight decay among this one and those inside it.
    Relies on `Optimizer._use_weight_decay`, which the update asks with TensorFlow's variables, and on
    `_exclude_from_weight_decay_cache`, which keeps its answers; without them workers that exclude different weights go
    unnoticed."""
    found = []
    for each in with_inner(optimizer):
        decays = getattr(each, "_use_weight_decay", None)
        if each.weight_decay and decays is not None:
            with attribute_replaced(each, "_exclude_from_weight_decay_cache", {}):
                found.append([number for number, weight in enumerate(weights) if decays(weight.value)])
    return found
