"""The user's own data: --source=package.module:function.

The function is called in every worker with those of these keyword arguments that it declares: `split` ("train" or
"eval"), `config` (a DataConfig) and the options in --source_args (all of them must be declared; **kwargs takes
everything). It returns the data of one split:

  (x, y) or (x, y, w)      arrays with one row per sample, or nests (tuples, dicts) of such arrays
  an object                with __len__ and __getitem__(i) -> (x, y) or (x, y, w): one sample, all of one shape and
                           type (objects.py says how these are found). Several threads may call it at the same time.
                           Its attribute `num_classes` is read if it has one
  tf.data.Dataset          of single samples, not of batches, the same at every pass. It must not be shuffled, repeated
                           or sharded, since tfdist does that, nor be given deterministic=False. Some parts may be drawn
                           anew at each pass (noise) if another one shows that the order is the same (contents.py). It
                           is read as a stream (streams.py says what is lost)
  Split                    anything else (tfdist/data/sources/split.py)

or of both: {"train": ..., "eval": ...}, or a pair of pairs, as keras.datasets.*.load_data() returns them. A function
that does not declare `split` must return both: otherwise the model would be evaluated on its training data.
Such a function is called once, others once for each split.

Python's, NumPy's and TensorFlow's random numbers start from --seed at each call, so that a random split is the same on
all workers and after a restart. Other random generators need a seed: workers compare their data
(tfdist/data/contents.py), and differences end the run.

w is the weight of a sample (or of each of its tokens), float32. Integer y of rank 1 gives the number of classes.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat import tensorflow_data
from tfdist.config import DataConfig, parse_args
from tfdist.control.exit_codes import ConfigError, DataError
from tfdist.control.passing_errors import reading_failed
from tfdist.control.user_errors import failure_in_text
from tfdist.data import contents
from tfdist.data.sources.objects import object_split
from tfdist.data.sources.split import Split, array_split, places
from tfdist.plugins import check_switches, own_code, resolve
from tfdist.runtime.errors import cause

_MOST_CLASSES = 10**8  # a model has an output for each class


def load(config: DataConfig, split: str) -> Split:
    """Loads a split by the user's function. Raises ConfigError if the function is missing or does not take an option,
    DataError for its data."""
    function = resolve("source", config.source, {})
    arguments, takes_split = _arguments(function, config, split)
    result = _called.pop(config, None) if split == "eval" else None
    if result is None:
        with own_code("source", config.source):
            result = function(**arguments)
        _called.clear()
        if split == "train" and not takes_split:
            _called[config] = result
    name = f"{config.source}/{split}"
    if isinstance(result, dict) and set(result) == {"train", "eval"}:
        pair = (result["train"], result["eval"])
    elif _is_pair_of_pairs(result) and not takes_split:
        pair = result
    elif takes_split:
        return _split(name, result)
    else:
        raise DataError(
            f"--source={config.source} does not declare `split` and returned one set of data ({type(result).__name__}),"
            " which would be both trained and evaluated on: declare `split`, or return {'train': ..., 'eval': ...}."
        )
    found = _split(name, pair[split == "eval"])
    # Classes are counted over both splits, since one of them may lack the last class.
    counts = [_count_classes(part) for part in pair]
    classes = [count for count in counts if count is not None]
    return dataclasses.replace(found, num_classes=max(classes)) if len(classes) == len(counts) else found


# The result of a function that returns both splits, kept from "train" until "eval" is asked for: a function that draws
# a new split at each call would put training samples into the evaluation.
_called: dict[DataConfig, Any] = {}


def _arguments(function: Callable, config: DataConfig, split: str) -> tuple[dict[str, Any], bool]:
    options = parse_args("source_args", config.source_args)
    check_switches("source_args", options, function)
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some built-in functions have no signature
        parameters = ()
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    declared = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for option in options:
        if option not in declared and not anything or option in ("split", "config"):
            raise ConfigError(
                f"--source_args={config.source_args}: {config.source} does not take {option!r}; it takes "
                f"{', '.join(sorted(declared - {'split', 'config'})) or 'none'}."
            )
    given = {"split": split, "config": config}
    missing = [p.name for p in parameters if p.name in declared - set(options) - set(given) and p.default is p.empty]
    if missing:
        raise ConfigError(
            f"--source={config.source} needs a value for {missing[0]!r}: add --source_args={missing[0]}=..."
        )
    takes_split = "split" in declared or anything
    return options | {k: v for k, v in given.items() if k in declared or anything}, takes_split


def _split(name: str, data: Any) -> Split:
    """Makes one split from whatever the function returned for it."""
    if isinstance(data, Split):
        if data.check().size is None:
            _must_keep_order(data, "a Split with a stream")
        return data
    if isinstance(data, tf.data.Dataset):
        return _dataset_split(name, data)
    if isinstance(data, tuple) and len(data) in (2, 3):
        _check_arrays(name, data)
        arrays = tf.nest.map_structure(np.asarray, data)
        if len(data) == 3:
            try:
                arrays = (*arrays[:2], tf.nest.map_structure(lambda w: w.astype(np.float32), arrays[2]))
            except (ValueError, TypeError) as error:
                raise DataError(
                    f"--source: the weights of {name} are not numbers ({error}): return (x, y, w) with one number per"
                    " sample, or token, in w."
                ) from None
        return array_split(name, arrays, num_classes=_count_classes(data))
    if isinstance(data, keras.utils.PyDataset):
        raise DataError(f"--source: {name} is a Keras PyDataset, which yields batches: return single samples instead.")
    if type(data) is list and len(data) in (2, 3) and isinstance(data[0], np.ndarray):
        raise DataError(f"--source: {name} is a list of {len(data)} arrays: return a tuple, (x, y) or (x, y, w).")
    is_sequence = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if is_sequence and not isinstance(data, (dict, str, bytes, np.ndarray)):
        return object_split(name, data)
    raise DataError(
        f"--source: {name} is a {type(data).__name__}: return (x, y) arrays, an object with __len__ and __getitem__, "
        "a tf.data.Dataset or a Split."
    )


def _check_arrays(name: str, data: tuple) -> None:
    """Raises DataError for anything that is not an array of numbers with one row per sample."""
    for part, words in zip(data, ("x", "y", "w"), strict=False):
        if part is None or isinstance(part, (tf.RaggedTensor, tf.SparseTensor)):
            raise DataError(
                f"--source: {words} of {name} is {'None' if part is None else f'a {type(part).__name__}'}: return an"
                " array with one row per sample, all of one shape."
            )
        if isinstance(part, list):
            raise DataError(f"--source: {words} of {name} is a Python list: return an array, numpy.array({words}).")
        for leaf in tf.nest.flatten(part):
            if np.asarray(leaf).dtype.kind == "c":
                raise DataError(
                    f"--source: {words} of {name} contains complex numbers, which models do not accept: return their"
                    " real and imaginary parts."
                )


def _dataset_split(name: str, data: tf.data.Dataset) -> Split:
    spec = data.element_spec
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise DataError(f"--source: {name} is a tf.data.Dataset of {spec}: its elements must be (x, y) or (x, y, w).")
    for part in keras.tree.flatten(spec):
        if not isinstance(part, tf.TensorSpec):
            kind = type(part).__name__.removesuffix("Spec")
            raise DataError(
                f"--source: {name} is a tf.data.Dataset with a {kind}: make dense tensors of it, of one shape."
            )
    if any(s.shape.rank is None or None in s.shape for s in tf.nest.flatten(spec)):
        raise DataError(
            f"--source: {name} is a tf.data.Dataset with a dim of unknown length ({spec}): it must yield single samples"
            " of one shape, not batches."
        )
    if len(spec) == 3 and any(not (s.dtype.is_floating or s.dtype.is_integer) for s in tf.nest.flatten(spec[2])):
        raise DataError(f"--source: {name} is a tf.data.Dataset whose weights are not numbers ({spec[2]}): fix w.")
    if data.cardinality() == 0:
        raise DataError(f"--source: {name} is an empty tf.data.Dataset.")

    if len(spec) == 3 and any(s.dtype != tf.float32 for s in tf.nest.flatten(spec[2])):
        data = data.map(lambda x, y, w: (x, y, tf.nest.map_structure(lambda part: tf.cast(part, tf.float32), w)))

    def stream(shard: int, shards: int) -> tf.data.Dataset:
        return data.shard(shards, shard) if shards > 1 else data

    element_spec: Any = data.element_spec
    split = Split(name, None, element_spec, stream=stream)
    _must_keep_order(split, "a tf.data.Dataset")
    return split


def _must_keep_order(split: Split, what_it_is: str) -> None:
    """Raises DataError if a stream is empty, cannot be read, or may come in another order at each pass."""
    named = f"--source: {split.name}"
    try:
        steady, shows_order, _ = contents.read_twice(split)
    except tf.errors.OpError as error:
        reason = failure_in_text(str(error.message)) or f"cannot be read: {cause(str(error.message))}"
        raise reading_failed(f"{named}, {what_it_is}, {reason}", str(error.message)) from error
    if not steady and split.contents is None:
        raise DataError(f"{named} is {what_it_is} that yields no sample: check what it reads, and its filters.")
    parts, again = (list(tensorflow_data.with_inputs(split.stream(0, 1))) for _ in range(2))
    fix = (
        "drop its shuffle() (tfdist shuffles) or give it a seed and reshuffle_each_iteration=False, use"
        " list_files(shuffle=False), and let --augment draw what is random"
    )
    if any(map(tensorflow_data.in_any_order, parts)):
        what = "with deterministic=False, so that what is ready first comes first"
        fix = "drop deterministic=False (or sloppy=True)"
    elif not shows_order:
        differing = [place for place, same in zip(places(split.element_spec), steady, strict=True) if not same]
        what = (
            f"whose first samples differ at a second look in {', '.join(differing)}, and no other part shows that they"
            " came in the same order"
        )
    elif any(map(_shuffle_apart, parts, again)):
        what = "that is shuffled anew at each pass"
    else:
        return
    raise DataError(
        f"{named} is {what_it_is} {what}: each worker reads all of it and keeps its share, and a resumed run reads"
        f" up to where it was, so the order must be the same at every pass; {fix}."
    )


def _shuffle_apart(one: tf.data.Dataset, other: tf.data.Dataset) -> bool:
    """Whether the same part of a stream shuffles into different orders at two passes, for which the stream was made
    twice."""
    if one is other:
        return tensorflow_data.shuffles_anew(one)  # each iterator of it draws the next order
    seeds, others = tensorflow_data.seeds_of(one), tensorflow_data.seeds_of(other)
    return seeds != others or tensorflow_data.shuffles_without_a_seed(one)


def _is_pair_of_pairs(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return all(isinstance(part, tuple) and len(part) in (2, 3) for part in value)


def _count_classes(data: Any) -> int | None:
    """Returns the largest label + 1 if the data are arrays with integer labels of rank 1, else None."""
    if not isinstance(data, tuple) or len(data) not in (2, 3) or isinstance(data[1], (tuple, dict)):
        return None
    y = np.asarray(data[1])
    if y.ndim != 1 or not len(y) or not np.issubdtype(y.dtype, np.integer):
        return None
    largest = int(y.max())
    if not 0 <= largest < _MOST_CLASSES:
        raise DataError(
            f"--source: the labels in y go up to {largest}, which are not classes numbered from 0: number the classes,"
            " or return floats for a regression."
        )
    return largest + 1
