"""The tfds source: any prepared TensorFlow Datasets data set, by name.

Records are read at random: through TFDS's data source if the data set is stored as array_record; through an index of
the records (records.py) if it is stored as TFRecord on a local disk. Anything else is read as a stream. If the decoded
samples have one size and fit in `memory_mb`, they are decoded once and kept in memory, whatever the format.

x is the input, y the label of the data set's supervised keys. uint8 images become float32 in 0..1; integer y is int32.

Options:
  name        for example mnist or imagenet2012:5.1.0; without it, --data_dir must be a prepared folder itself (the one
              with dataset_info.json)
  train, eval splits in TFDS's language, for example train=train[:90%],eval=train[90%:]; default: train; validation or
              else test
  x, y        features to use instead of the supervised keys
  image_size  for images of varying size: the shorter side is resized to image_size / 0.875, and the center kept; but in
              training with --augment=random_resized_crop a random crop is resized while decoding (in a stream: a
              crop of that center)
  memory_mb   see above; 0: never
  download    True: download and prepare the data set if it is not there. Do it once before a run with several workers:
              `tfds build NAME`
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.config import DataConfig
from tfdist.control.exit_codes import ConfigError, DataError, UnsupportedError
from tfdist.control.user_errors import first_line
from tfdist.data.checksums import checksum_of, sampled_rows
from tfdist.data.sources import images
from tfdist.data.sources.records import RecordFiles, Rows, read_in_graph
from tfdist.data.sources.split import Sample, Split, array_split, is_spatial, read_options, scaled, scaled_spec
from tfdist.data.sources.stored_records import StoredRecords
from tfdist.runtime.host import known_dims
from tfdist.storage.data_cache import DataCache, cache_of

DEFAULTS = {
    "name": "",
    "train": "train",
    "eval": "",
    "x": "",
    "y": "",
    "image_size": 0,
    "memory_mb": 512,
    "download": False,
}


def load(config: DataConfig, split: str) -> Split:
    """Loads a split. Raises UnsupportedError without the package, DataError if the data set is missing or unfit."""
    options = read_options(config, DEFAULTS)
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise UnsupportedError(
            "--source=tfds needs TensorFlow Datasets: run `pip install tensorflow-datasets`."
        ) from error
    builder, chosen = _brought(tfds, config.data_dir, options, split)
    decoder = _Decoder(tfds, builder.info, options)
    name = f"tfds/{builder.name}/{chosen[split]}"
    size = builder.info.splits[chosen[split]].num_examples
    read = _reader(tfds, builder, chosen[split], cache_of(config.data_dir))
    if read is None:
        examples = builder.as_dataset(
            split=chosen[split],
            decoders=decoder.decoders,
            shuffle_files=False,
            read_config=tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False),
        ).map(decoder.pick)
        stored = examples.batch(256)
    else:
        stored = tf.data.Dataset.range(size).batch(256).map(lambda rows: decoder.stored(read_in_graph(read, rows)))
    if size * decoder.stored_bytes <= options["memory_mb"] * 2**20:
        columns = zip(*stored.as_numpy_iterator(), strict=True)
        arrays = tuple(np.concatenate(column) for column in columns)
        return array_split(name, arrays, num_classes=decoder.num_classes, scale=True)
    if read is None:
        samples = examples.batch(16).map(decoder.finish).unbatch()
        return Split(
            name,
            None,
            decoder.spec,
            num_classes=decoder.num_classes,
            stream=lambda shard, shards: samples.shard(shards, shard),
        )

    def fetch(indices: tf.Tensor, seeds: tf.Tensor | None = None) -> Sample:
        x, y = decoder.stored(read_in_graph(read, indices))
        return decoder.finish(x, y, seeds)

    cropped = fetch if decoder.image_size and not is_spatial(decoder.spec[1].shape) else None
    return Split(
        name,
        size,
        decoder.spec,
        fetch,
        decoder.num_classes,
        fetch_cropped=cropped,
        contents=lambda: [checksum_of(read(sampled_rows(size)))],
    )


class _Decoder:
    """Decodes records into (x, y). image_size 0: all samples have one size."""

    def __init__(self, tfds: Any, info: Any, options: dict[str, Any]):
        self.features, self.image_size = info.features, options["image_size"]
        keys = info.supervised_keys if len(info.supervised_keys or ()) == 2 else ("", "")
        self.x, self.y = (options[option] or key for option, key in zip("xy", keys, strict=True))
        for option, key in (("x", self.x), ("y", self.y)):
            if not isinstance(key, str) or key not in self.features:
                raise DataError(
                    f"{info.name} has no feature {key!r} for {option}: set {option}= in --source_args to one of "
                    f"{', '.join(self.features)}."
                )
        x, y = self.features[self.x], self.features[self.y]
        if self.image_size and not isinstance(x, tfds.features.Image):
            raise DataError(
                f"--source_args: image_size={self.image_size} is for images, but {self.x!r} of {info.name} is {x}:"
                " drop it."
            )
        for key, feature in ((self.x, x), (self.y, y)):
            if not (_is_fixed(tfds, feature) or (feature is x and self.image_size)):
                raise DataError(
                    f"{info.name} has no numbers of one shape in {key!r} but {feature}: choose another feature, or for "
                    "images set image_size=N in --source_args."
                )
        self.decoders = {self.x: tfds.decode.SkipDecoding()} if self.image_size else None
        self.num_classes = getattr(y, "num_classes", None)
        stored_x, stored_y = (tf.TensorSpec([], tf.string) if self.image_size else _spec(x)), _narrow(_spec(y))
        used_x = (
            tf.TensorSpec([self.image_size] * 2 + [x.shape[-1]], tf.float32)
            if self.image_size
            else scaled_spec(stored_x)
        )
        self._stored_spec, self.spec = (stored_x, stored_y), (used_x, stored_y)

    @property
    def stored_bytes(self) -> float:
        """Memory of one sample as it is kept, in bytes; infinite for encoded images."""
        return math.inf if self.image_size else sum(s.shape.num_elements() * s.dtype.size for s in self._stored_spec)

    def pick(self, example: dict[str, tf.Tensor]) -> Sample:
        x, y = example[self.x], example[self.y]
        return x, tf.cast(y, tf.int32) if y.dtype == tf.int64 else y

    def stored(self, records: tf.Tensor) -> Sample:
        """Returns records, string [n], as (x, y) in stored form: encoded images of varying size, else uint8."""
        return tf.map_fn(
            lambda record: self.pick(self.features.deserialize_example(record, decoders=self.decoders)),
            records,
            fn_output_signature=self._stored_spec,
        )

    def finish(self, x: tf.Tensor, y: tf.Tensor, seeds: tf.Tensor | None = None) -> Sample:
        """Turns (x, y) as stored into (x, y) for training; crops images at random if there are seeds int32 [n, 2]."""
        if not self.image_size:
            return scaled(x), y
        size, channels = known_dims(self.spec[0].shape)[1:]
        x = images.decode(x, size, channels) if seeds is None else images.decode_cropped(x, seeds, size, channels)
        return x, y


def _brought(tfds: Any, data_dir: str, options: dict[str, Any], split: str) -> tuple[Any, dict[str, str]]:
    """Returns (builder, the names of both its splits). From an object store, the description of the data set and the
    files of `split` are fetched first.
    """
    cache = cache_of(data_dir)
    if cache:
        if options["download"]:
            raise ConfigError(
                f"--source_args: download=True, but --data_dir={cache.url} is an object store: prepare the data set"
                " with `tfds build`, and copy its folder there."
            )
        # Everything that is no shard of samples: the description, names of labels, and the like.
        cache.bring([path for path in map(cache.path, cache.entries) if "-of-" not in os.path.basename(path)])
    builder = _builder(tfds, data_dir, options)
    chosen = _chosen_splits(builder, options)
    if cache:
        instructions = builder.info.splits[chosen[split]].file_instructions
        if builder.info.file_format is not tfds.core.FileFormat.TFRECORD:
            cache.must_copy(f"{builder.name}, stored as {builder.info.file_format.value},")
        if cache.copies:
            cache.bring(sorted({os.fspath(each.filename) for each in instructions}))
    return builder, chosen


def _builder(tfds: Any, data_dir: str, options: dict[str, Any]) -> Any:
    """Returns the builder of a prepared data set."""
    name = options["name"]
    if not name and not data_dir:
        raise DataError(
            "--source=tfds needs a data set: set --source_args=name=..., for example name=mnist, or --data_dir to a "
            "prepared folder."
        )
    if not name and not tf.io.gfile.exists(os.path.join(data_dir, "dataset_info.json")):
        raise DataError(
            f"--data_dir={data_dir} has no dataset_info.json, so it is not a prepared data set: name one inside it by"
            " --source_args=name=..., or give the folder of its version, for example mnist/3.0.1."
        )
    try:
        builder = tfds.builder(name, data_dir=data_dir or None) if name else tfds.builder_from_directory(data_dir)
    except (tfds.core.DatasetNotFoundError, FileNotFoundError, ValueError) as error:
        raise DataError(f"--source=tfds found no data set {name or data_dir!r}: {first_line(error)[:200]}") from error
    if options["download"]:
        builder.download_and_prepare()
    if not builder.is_prepared():
        raise DataError(
            f"The data set {name} is not prepared in {data_dir or 'the default folder of TFDS'}: run `tfds build {name}"
            f"{f' --data_dir={data_dir}' if data_dir else ''}` once, or set download=True in --source_args."
        )
    return builder


def _chosen_splits(builder: Any, options: dict[str, Any]) -> dict[str, str]:
    """Returns {"train": ..., "eval": ...} in TFDS's language. Raises DataError if one is missing or they overlap."""
    splits = builder.info.splits
    held_out = options["eval"] or next((name for name in ("validation", "test") if name in splits), "")
    chosen = {"train": options["train"], "eval": held_out}
    ranges = {}
    for which, split in chosen.items():
        try:
            ranges[which] = [(i.filename, i.skip, i.skip + i.take) for i in splits[split].file_instructions]
        except (KeyError, ValueError) as error:
            raise DataError(
                f"{builder.name} has no split {split or 'validation or test'!r} for {which}; it has"
                f" {', '.join(sorted(splits))}: set for example train=train[:90%],eval=train[90%:] in --source_args."
            ) from error
    if any(a[0] == b[0] and max(a[1], b[1]) < min(a[2], b[2]) for a in ranges["train"] for b in ranges["eval"]):
        raise DataError(
            f"The splits train={chosen['train']} and eval={held_out} of {builder.name} share samples: choose disjoint"
            " ones in --source_args."
        )
    return chosen


def _reader(tfds: Any, builder: Any, split: str, cache: DataCache | None) -> Callable[[Rows], list[bytes]] | None:
    """Returns a function from row numbers to serialized records, or None if the format has no random access."""
    formats = tfds.core.FileFormat
    if builder.info.file_format is formats.ARRAY_RECORD:
        try:
            source = builder.as_data_source(split=split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES)
        except ImportError as error:
            raise UnsupportedError(
                f"{builder.name} is stored as array_record: run `pip install array-record`."
            ) from error
        return lambda rows: source.__getitems__([int(row) for row in rows])
    instructions = builder.info.splits[split].file_instructions
    paths = [os.fspath(i.filename) for i in instructions]
    if cache and not cache.copies:
        files = StoredRecords(cache, paths)
    elif builder.info.file_format is formats.TFRECORD and all(map(os.path.isfile, paths)):
        files = RecordFiles(paths, cache.named_copy if cache else str)
    else:
        return None
    starts = np.cumsum([0] + [i.examples_in_shard for i in instructions])
    if len(files) != starts[-1]:
        raise DataError(
            f"{builder.name} has {len(files)} records in its files but {starts[-1]} in its description: prepare it"
            " again."
        )
    rows = [at + i.skip + np.arange(i.take) for at, i in zip(starts[:-1], instructions, strict=True)]
    files.select(np.concatenate(rows))
    return files.read


def _is_fixed(tfds: Any, feature: Any) -> bool:
    """Whether the feature is one tensor of numbers with a known shape."""
    info = feature.get_tensor_info()
    return isinstance(info, tfds.features.TensorInfo) and None not in info.shape and info.tf_dtype != tf.string


def _spec(feature: Any) -> tf.TensorSpec:
    info = feature.get_tensor_info()
    return tf.TensorSpec(info.shape, info.tf_dtype)


def _narrow(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec(spec.shape, tf.int32) if spec.dtype == tf.int64 else spec
