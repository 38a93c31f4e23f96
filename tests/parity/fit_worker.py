"""One process of tests/parity/test_fit.py: runs every case and writes the results.

    python -m tests.parity.fit_worker OUT_DIR plain|auto|ring [CASE...]      with TF_CONFIG for more than one worker

plain: Keras' own functions, without XLA, so that compiled cases are compared with something that is not compiled; auto,
ring: tfdist's functions with this kind of communication.

Writes OUT_DIR/CASE-K.json for rank K. One process runs all cases, because starting TensorFlow takes longer than most of
them.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path


def fit_of_keras(model, *args, **kwargs):
    """Builds the optimizer first: else Keras does so in the first step, which TensorFlow then traces a second time."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and all(layer.built for layer in model._flatten_layers()):
        optimizer.build(model.trainable_variables)
    return type(model).fit(model, *args, **kwargs)


def main(out: Path, which: str, names: list[str]) -> None:
    import keras
    import numpy as np

    import tfdist
    from tests.parity import lean
    from tests.parity.fit_derivative_cases import CASES

    if which == "plain":
        fit, evaluate, predict = fit_of_keras, keras.Model.evaluate, keras.Model.predict
        compile_of_keras = keras.Model.compile
        keras.Model.compile = lambda self, *args, **kwargs: compile_of_keras(
            self, *args, **{**kwargs, "jit_compile": False}
        )
        rank = 0
    else:
        fit, evaluate, predict = tfdist.fit, tfdist.evaluate, tfdist.predict
        rank = tfdist.init(communication=which).rank

    def quiet(function):
        return lambda *args, **kwargs: function(*args, **{"verbose": 0, **kwargs})

    lean.prepare(oracle=which == "plain")
    for number, name in enumerate(names or CASES):
        lean.next_model(collect=number % 20 == 19)
        keras.utils.set_random_seed(1)
        folder = out / f"{name}-{rank}"
        folder.mkdir()
        begun = time.process_time()
        found = CASES[name](quiet(fit), quiet(evaluate), quiet(predict), str(folder))
        unfinished = out / f"{name}-{rank}.unfinished"
        unfinished.write_text(json.dumps(found, default=lambda value: np.asarray(value).tolist()))
        unfinished.rename(out / f"{name}-{rank}.json")
        print(f"case {name} done, {time.process_time() - begun:.1f} s of a processor", flush=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
