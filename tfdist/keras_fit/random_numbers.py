"""Random numbers while a model is distributed.

Outside of the forward pass every worker computes the same, so it must draw the same numbers. In the forward pass over
its own rows, it must draw other numbers than the other workers do for theirs (dropout). So all workers hold the chief's
seeds, and advance them alike; only draws inside the forward pass use a seed that is shifted by the rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import keras_random, tensorflow_random
from tfdist.compat.temporary_attributes import attribute_replaced
from tfdist.keras_fit.variables import take_the_chiefs
from tfdist.keras_fit.worker_dependence import mark_worker_dependent
from tfdist.runtime.base import PeerRuntime
from tfdist.runtime.scopes import Once, ThreadScope
from tfdist.training.row_checks.trial_scope import in_trials
from tfdist.training.unsaved_state_checks import check_compiled


class RandomNumbers:
    """Makes workers draw the same random numbers, or different ones; one object for all models of a runtime.

    Attributes: installed, a context in which workers draw as described above; in_lockstep, one in which all workers run
    the same code, so that a generator that is used for the first time can take the chief's state.
    """

    def __init__(self, runtime: PeerRuntime):
        self._runtime = runtime
        self._generators: dict[keras.random.SeedGenerator, None] = {}  # those known to be in the chief's state
        self.in_lockstep = ThreadScope()
        self._program, self._of_own_rows = ThreadScope(), ThreadScope()
        self.installed = Once(self._installed)

    @property
    def states(self) -> list[keras.Variable]:
        """The states of the generators that are known to be in the chief's state."""
        return [generator.state for generator in self._generators]

    def hold_the_chiefs(self, generators: Iterable[keras.random.SeedGenerator]) -> None:
        """Notes generators that need no further care: their states are among the variables that all take from the
        chief."""
        self._generators.update(dict.fromkeys(generators))

    @contextlib.contextmanager
    def of_own_rows(self) -> Iterator[None]:
        """Context manager in which workers draw different numbers; rank 0 draws as in one process. Raises ConfigError
        if XLA prevents that."""
        rank = self._runtime.rank
        keys = tensorflow_random.keys_moved(rank) if rank else contextlib.nullcontext()
        with self._of_own_rows(), keys, tensorflow_random.seeds_moved(rank):
            yield
        check_compiled("compile the model with jit_compile=False")

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        lent = self._lent_seed()
        drawn_without_one = keras_random.global_seed_generator()  # made when first needed
        self.hold_the_chiefs([drawn_without_one] if drawn_without_one is not None else [])
        take_the_chiefs(self._runtime, [generator.state for generator in self._generators])
        draw, make_default_seed = keras.random.SeedGenerator.next, keras_random.make_default_seed()

        def next_seed(generator: keras.random.SeedGenerator, *args: Any, **kwargs: Any) -> tf.Tensor:
            if self._runs_alike() and generator not in self._generators:
                self._meet(generator)
            seed = draw(generator, *args, **kwargs)
            if not self._of_own_rows.is_here:
                return seed
            return mark_worker_dependent(tf.stack([self._move(seed[0]), seed[1]]))

        def default_seed() -> int:
            own_seed = make_default_seed()
            return self._of_chief(own_seed) if self._runs_alike() else own_seed

        with (
            lent,
            self._program(),
            attribute_replaced(keras.random.SeedGenerator, "next", tf.autograph.experimental.do_not_convert(next_seed)),
            attribute_replaced(keras_random.SEEDS, keras_random.MAKE_DEFAULT_SEED, default_seed),
        ):
            yield

    def _runs_alike(self) -> bool:
        """Whether all workers are at this place of the program: in a step of Keras' loops, or tracing a function."""
        if in_trials.is_here:  # other workers may make other trials
            return False
        return self.in_lockstep.is_here or (self._program.is_here and not tf.executing_eagerly())

    def _meet(self, generator: keras.random.SeedGenerator) -> None:
        with tf.init_scope():
            if tf.convert_to_tensor(
                generator.state.value.is_initialized()
            ):  # else it was created in this trace, from the chief's seed
                take_the_chiefs(self._runtime, [generator.state])
        self.hold_the_chiefs([generator])

    def _of_chief(self, number: int) -> int:
        return int(self._runtime.broadcast([np.array([number], np.int64)])[0][0])

    def _move(self, seed: Any) -> Any:
        """Shifts a seed, a number or a tensor, by the rank."""
        return tensorflow_random.moved_seed(seed, self._runtime.rank) if self._runtime.rank else seed

    def _lent_seed(self) -> contextlib.AbstractContextManager[None]:
        """Context manager in which tf.random.* draws the same on all workers: with the chief's seed, if their own
        differ or there is none.
        """
        seed = tensorflow_random.global_seed()
        stamp = np.array([tensorflow_random.state_digest(), -1 if seed is None else int(seed)], np.int64)
        stamps = self._runtime.all_gather(stamp)
        if (stamps[:, 1] < 0).any() or (stamps != stamps[0]).any():
            drawn = int(np.random.SeedSequence().generate_state(1)[0]) % 2**31
            chiefs = self._of_chief(drawn if seed is None else int(seed))
            return tensorflow_random.seed_lent(chiefs, anew=bool((stamps[:, 1] >= 0).any()))
        return contextlib.nullcontext()
