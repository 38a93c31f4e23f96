"""The context manager of a trial: a computation made once to see how a model behaves, without side effects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfdist.artifacts import state
from tfdist.compat import keras_random, tensorflow_random
from tfdist.compat.tensorflow_functions import functions_inline
from tfdist.runtime.scopes import ThreadScope

in_trials = ThreadScope()  # other workers may not make the same trial: code inside must not wait for them


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Context manager that restores Python's, NumPy's and TensorFlow's global generators, and in which tf.functions
    held by layers keep no traces. All workers must enter it, also those that try nothing: a layer may draw from the
    generators when the step is traced."""
    before, of_keras = state.generator_states(), keras_random.global_seed_generator()
    try:
        with in_trials(), functions_inline(), tensorflow_random.state_kept():
            yield
    finally:
        keras_random.use_generator(of_keras)  # a generator made by a trial would exist on this worker alone
        state.restore_generator_states(before)
