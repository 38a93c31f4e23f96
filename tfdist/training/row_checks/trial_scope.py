"""The context of a trial: of what is computed once to see how it behaves, and leaves no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfdist.artifacts import state
from tfdist.compat import keras_random, tensorflow_random
from tfdist.compat.tensorflow_functions import functions_inline
from tfdist.runtime.scopes import ThreadScope

in_trials = ThreadScope()  # of a model, that other workers need not make: no place to wait for them


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """A context that restores Python's, NumPy's and TensorFlow's global generators, and in which functions that layers
    hold keep nothing. To be entered by all workers, also by those that try nothing: a layer may draw from the
    generators when the step is traced."""
    before, of_keras = state.generator_states(), keras_random.global_seed_generator()
    try:
        with in_trials(), functions_inline(), tensorflow_random.state_kept():
            yield
    finally:
        keras_random.use_generator(of_keras)  # one that a trial has made is on this worker alone
        state.restore_generator_states(before)
