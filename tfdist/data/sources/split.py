"""Split, the result of a data source, and the functions that sources use to make one.

A source is a function `load(config: DataConfig, split: "train" | "eval") -> Split`: one file each, and one line in
source_names.py. Terms: n, number of samples requested at once; a *nest* is a tensor, or a tuple or dict of nests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.config import DataConfig, parse_args
from tfdist.control.exit_codes import ConfigError, DataError
from tfdist.data.checksums import checksum
from tfdist.runtime import negative_weights
from tfdist.runtime.host import host_view

Sample = tuple  # (x, y) or (x, y, w): nests of tensors; w, the weight, is float32, a scalar or one per token
SPLITS = ("train", "eval")


def missing(*_: Any) -> Any:
    """Takes the place of a way of reading that a split lacks. Raises NotImplementedError."""
    raise NotImplementedError("A split is read by its `fetch` if it has a size, else by its `stream`.")


@dataclass(frozen=True)
class Split:
    """The samples of one split, without an order.

    Either `size` and `fetch` are set (random access, the usual case), or `size` is None and `stream` is set.

    name: for messages, for example "digits/train".
    size: number of samples, or None for a stream.
    element_spec: (x, y) or (x, y, w) nests of tf.TensorSpec of one sample, no batch dim, shapes fully known.
    fetch: int64 [n] sample indices in 0..size-1, in any order and with repeats, -> (x, y) or (x, y, w) with leading dim
        n. Called while a tf.data map is traced; must be stateless.
    num_classes: classes or vocabulary size of y, or None if y is no class index.
    info: what is worth logging; numbers and strings.
    stream: (shard, shards) -> dataset of single samples, one pass, the same at every call. The shards are disjoint and
        complete. It is called with (0, 1), or with a number of shards that divides `stream_shards`.
    stream_shards: number of shards of equal length into which the stream can be cut without reading all of it, for
        example its files. 1 if the shards differ in length: samples of short ones would be taken more often.
    records: replaces stream; yields the elements that `decode` turns into samples. Each replica then decodes its own
        rows only.
    decode: a batch of `records`, [n], -> (x, y) or (x, y, w) with leading dim n. Must be stateless.
    fetch_cropped: like fetch, with int32 [n, 2] seeds as its second argument: each image is a random resized crop of
        the stored one, taken while decoding. For images that are stored larger than they are used. A target with places
        in the image must be cropped alike.
    cheap: making a sample costs little more than copying it, for example because it is in memory.
    fixed: for benchmarks: the pipeline makes the first batches once and returns them forever.
    labels: returns all of y, if y is one integer array in memory.
    contents: returns checksums of the data, if the source has a better way than reading some samples (contents.py).
    """

    name: str
    size: int | None
    element_spec: tuple
    fetch: Callable[[tf.Tensor], Sample] = missing
    num_classes: int | None = None
    info: dict[str, Any] = field(default_factory=dict)
    stream: Callable[[int, int], tf.data.Dataset] = missing
    stream_shards: int = 1
    records: Callable[[int, int], tf.data.Dataset] | None = None
    decode: Callable[..., Sample] = missing
    fetch_cropped: Callable[[tf.Tensor, tf.Tensor], Sample] | None = None
    cheap: bool = False
    fixed: bool = False
    labels: Callable[[], np.ndarray] | None = None
    contents: Callable[[], list[int]] | None = None

    def __post_init__(self):
        if self.records:
            object.__setattr__(self, "records", _in_one_order(self.records))
            object.__setattr__(self, "stream", self._decoded)
        elif self.stream not in (missing, None):
            object.__setattr__(self, "stream", _in_one_order(self.stream))

    def _decoded(self, shard: int, shards: int) -> tf.data.Dataset:
        """Returns the stream of decoded `records`."""
        assert self.records
        return self.records(shard, shards).batch(64).map(self.decode, num_parallel_calls=tf.data.AUTOTUNE).unbatch()

    def samples(self, read: Any) -> Sample:
        """Returns the samples [n] of n elements of `records`, if the split has those, else of `stream`."""
        return self.decode(read) if self.records else read

    @property
    def length(self) -> int:
        """`size`, for a split that has one."""
        assert self.size is not None, self.name
        return self.size

    @property
    def sample_bytes(self) -> int:
        """Memory of one sample in bytes; a string counts as one byte."""
        return sum(math.prod(spec.shape) * spec.dtype.size for spec in tf.nest.flatten(self.element_spec))

    def check(self) -> Split:
        """Returns self, or raises DataError if the split is empty or not usable."""
        if self.size is None and self.stream in (missing, None):
            raise DataError(
                f"{self.name} has neither a size nor a stream: a source must set size and fetch, or stream."
            )
        if self.size is not None and (self.size < 1 or self.fetch in (missing, None)):
            raise DataError(f"{self.name} has no samples: check --source, --source_args and --data_dir.")
        if not isinstance(self.element_spec, tuple) or len(self.element_spec) not in (2, 3):
            raise DataError(f"{self.name} must yield (x, y) or (x, y, w), not {self.element_spec}.")
        for spec in tf.nest.flatten(self.element_spec):
            if not spec.shape.is_fully_defined():
                raise DataError(f"{self.name} has samples of varying shape {spec.shape}: give all of them one shape.")
            if 0 in spec.shape:  # TensorFlow's own operations crash on such samples
                raise DataError(f"{self.name} has samples of shape {spec.shape}, which are empty: check --source.")
        return self


def _in_one_order(stream: Callable[[int, int], tf.data.Dataset]) -> Callable[[int, int], tf.data.Dataset]:
    """Returns the stream, whose parallel operations keep the order of samples whatever its own tf.data.Options say."""
    options = tf.data.Options()
    options.deterministic = True
    return lambda shard, shards: stream(shard, shards).with_options(options)


def read_options(config: DataConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults updated by `--source_args`. Raises ConfigError for an unknown option or a wrong type."""
    given = parse_args("source_args", config.source_args)
    for name, value in given.items():
        if name not in defaults:
            raise ConfigError(
                f"--source_args={config.source_args}: --source={config.source} has no option {name!r}; "
                f"it has {', '.join(defaults) or 'none'}."
            )
        kind = type(defaults[name])
        if kind in (int, bool, str) and type(value) is not kind:
            raise ConfigError(
                f"--source_args: {name}={value!r} must be of type {kind.__name__}, for example"
                f" {name}={defaults[name]!r}."
            )
        if isinstance(value, int) and kind is int and value < 0:
            raise ConfigError(f"--source_args: {name}={value} must not be negative.")
    return {**defaults, **given}


def on_host(array: Any) -> tf.Tensor:
    """Returns a tensor in host memory. A tf.data map captures it and does not copy it into the graph, at any size."""
    with tf.device("/cpu:0"):
        return tf.convert_to_tensor(array)


def array_split(
    name: str,
    arrays: tuple,
    *,
    num_classes: int | None = None,
    scale: bool = False,
) -> Split:
    """Makes a split over arrays in memory.

    arrays: (x, y) or (x, y, w) nests of NumPy arrays with one leading dim. scale: see `scaled`; memory holds the uint8.
    Raises DataError if the lengths differ or an array cannot be a tensor.
    """
    flat = tf.nest.flatten(arrays)
    sizes = {len(array) if np.ndim(array) else 0 for array in flat}
    if len(sizes) != 1:
        lengths = [np.shape(array)[:1] for array in flat]
        raise DataError(f"{name} has arrays of different lengths {lengths}: x, y (and w) need one row per sample.")
    try:
        tensors = tf.nest.map_structure(on_host, arrays)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{name} has an array that cannot be a tensor ({error}): use numeric arrays of one shape."
        ) from error

    if len(arrays) == 3:
        negative_weights.refuse(arrays[2], name)

    def fetch(indices: tf.Tensor) -> Sample:
        sample = tf.nest.map_structure(lambda t: tf.gather(t, indices), tensors)
        return (tf.nest.map_structure(scaled, sample[0]), *sample[1:]) if scale else sample

    spec = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), tensors)
    if scale:
        spec = (tf.nest.map_structure(scaled_spec, spec[0]), *spec[1:])

    def contents() -> list[int]:
        return [checksum(host_view(tensor)) for tensor in tf.nest.flatten(tensors)]

    y = tensors[1]
    labels = (lambda: host_view(y)) if isinstance(y, tf.Tensor) and y.dtype.is_integer else None
    return Split(name, sizes.pop(), spec, fetch, num_classes, cheap=True, labels=labels, contents=contents)


def scaled(x: tf.Tensor) -> tf.Tensor:
    """Returns uint8 images [n, H, W, C] as float32 in 0..1; anything else unchanged."""
    return tf.cast(x, tf.float32) / 255.0 if x.dtype == tf.uint8 and x.shape.rank == 4 else x


def scaled_spec(spec: tf.TensorSpec) -> tf.TensorSpec:
    """Returns the spec of one sample after `scaled`."""
    return tf.TensorSpec(spec.shape, tf.float32) if spec.dtype == tf.uint8 and spec.shape.rank == 3 else spec


def is_spatial(shape: Iterable[int | None]) -> bool:
    """Whether the target of an image, of this shape without the dim of samples, may say something of places in the
    image, as masks, images and boxes do."""
    return sum(size != 1 for size in shape) > 1


def places(nest: Any, names: Sequence[str] = "xyw") -> list[str]:
    """Returns the names of the parts of a sample, in tf.nest's order: x, y, w, or x['image'] if x has several parts."""
    if isinstance(nest, dict):
        parts = [(nest[key], f"{names}[{key!r}]") for key in sorted(nest)]
    elif isinstance(nest, tuple | list):
        parts = [(part, names[at] if names == "xyw" else f"{names}[{at}]") for at, part in enumerate(nest)]
    else:
        return ["".join(names)]
    return [place for part, name in parts for place in places(part, name)]
