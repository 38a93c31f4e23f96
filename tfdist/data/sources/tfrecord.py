"""The tfrecord source: tf.train.Example records in TFRecord files.

The files of a split are those in --data_dir that match a pattern, in the order of their names. They are read at random
through an index of their records (records.py), so order, exactly-once and resume work as for any source.

Options:
  x, y        the parts of a sample, as FEATURE:KIND[SHAPE], for example x=image:uint8[28,28,1],y=label:int32.
              KIND[SHAPE] is
                float32, int64, int32 [...]  a float_list or int64_list (int32 is an int64_list, narrowed)
                uint8, float16, ... [...]    raw bytes, little endian, in a bytes_list; also raw_float32, raw_int64,
                                             raw_int32. In x, uint8 of rank 3 is an image and becomes float32 in 0..1
                image[H,H,C]                 a JPEG, PNG, GIF or BMP file, resized, the center kept (images.py); in
                                             training with --augment=random_resized_crop a random crop is resized
                                             (with stream=True a crop of that center)
              No [SHAPE] means one number.
  classes     number of classes or vocabulary size, if y is an integer
  train, eval file name patterns; default *train*, and *eval*, *val* or *test*. Names that begin with a dot are left out
  stream      True: read the files from front to back instead (streams.py says what is lost). Every replica reads all
              of them and decodes its own rows
  by_file     True, with stream=True: a replica reads only its own files, if the number of files is a multiple of the
              number of replicas. For files with equally many records: a pass with another number is an error
  compression GZIP or ZLIB; only with stream=True
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import tensorflow as tf

from tfdist.config import DataConfig
from tfdist.control.exit_codes import ConfigError, DataError
from tfdist.data.checksums import SAMPLED, checksum_of, sampled_rows
from tfdist.data.reading import as_is
from tfdist.data.sources.equal_shards import counted
from tfdist.data.sources.record_field import RecordField
from tfdist.data.sources.records import RecordFiles, check_begin, read_in_graph
from tfdist.data.sources.split import Sample, Split, is_spatial, read_options, scaled
from tfdist.data.sources.stored_records import StoredRecords
from tfdist.data.sources.stored_streams import first_of, stored_records
from tfdist.data.sources.whole_records import whole_records
from tfdist.runtime.damaged_record import note_files
from tfdist.runtime.errors import cause
from tfdist.storage.data_cache import cache_of
from tfdist.storage.in_threads import in_threads

DEFAULTS = {
    "x": "",
    "y": "",
    "classes": 0,
    "train": "",
    "eval": "",
    "stream": False,
    "by_file": False,
    "compression": "",
}
PATTERNS = {"train": ("*train*",), "eval": ("*eval*", "*val*", "*test*")}
_CYCLE = 4  # files of a stream that are read at a time, and fetched from a store at a time
_HEAD_BYTES, _MOST_HEADS = 1 << 14, 4096


def load(config: DataConfig, split: str) -> Split:
    """Loads a split as described above. Raises ConfigError for a wrong option, DataError if files are missing, damaged,
    or do not fit x and y."""
    options = read_options(config, DEFAULTS)
    x, y = (RecordField.parse(name, options[name]) for name in ("x", "y"))
    _check(options, y)
    folder = _Folder(config.data_dir)
    compression, paths = options["compression"], folder.paths(options, split)
    name, info = f"tfrecord/{split}", {"files": len(paths)}
    spec, classes = (x.spec_of_x, y.spec), options["classes"] or None
    features = {field.feature: field.parser for field in (x, y)}

    def parse(records: tf.Tensor, seeds: tf.Tensor | None = None) -> Sample:
        parsed: dict[str, Any] = tf.io.parse_example(records, features)
        return scaled(x.decode(parsed, seeds)), y.decode(parsed, None)

    if options["stream"]:
        paths = folder.not_empty(paths)
        first = folder.first_record(paths, compression) if paths else None
    else:
        files = folder.at_random(paths)
        first = files.read([0])[0] if len(files) else None
    if first is None:
        raise DataError(
            f"{name}: the {info['files']} files that match contain no record: check --data_dir and --source_args."
        )
    _try(parse, first, name)
    if options["stream"]:
        return Split(
            name,
            None,
            spec,
            num_classes=classes,
            info=info,
            stream_shards=len(paths) if options["by_file"] else 1,
            records=folder.equal_shards(paths, compression)
            if options["by_file"]
            else partial(folder.every_nth, paths, compression),
            decode=parse,
            contents=lambda: [*folder.checksums(paths), folder.checksum_of_heads(paths)],
        )

    def fetch(indices: tf.Tensor, seeds: tf.Tensor | None = None) -> Sample:
        return parse(read_in_graph(files.read, indices), seeds)

    return Split(
        name,
        len(files),
        spec,
        fetch,
        classes,
        info,
        fetch_cropped=fetch if x.kind == "image" and not is_spatial(y.shape) else None,
        contents=lambda: [*folder.checksums(paths), checksum_of(files.read(sampled_rows(len(files))))],
    )


def _check(options: dict[str, Any], y: RecordField) -> None:
    if y.spec.dtype.is_integer and not options["classes"]:
        raise ConfigError(
            f"--source_args: y={options['y']} is an integer, so the number of classes is needed: add classes=N."
        )
    compression = options["compression"]
    if compression not in ("", "GZIP", "ZLIB") or (compression and not options["stream"]):
        raise ConfigError(f"--source_args: compression={compression} must be GZIP or ZLIB, together with stream=True.")
    if options["by_file"] and not options["stream"]:
        raise ConfigError("--source_args: by_file=True is for files that are read from front to back: add stream=True.")


class _Folder:
    """--data_dir: a local folder, or local copies of objects in a store, each fetched when it is needed."""

    def __init__(self, data_dir: str):
        self._data_dir, self._cache = data_dir, cache_of(data_dir)
        self._sizes: dict[str, int] = {}

    def paths(self, options: dict, split: str) -> list[str]:
        """Returns the split's files, sorted. Raises DataError if there are none, or if one belongs to both splits."""
        found = self._matching(options, split)
        shared = set(found) & set(self._matching(options, "eval" if split == "train" else "train", required=False))
        if shared:
            raise DataError(
                f"{min(shared)} belongs to both splits: set train= and eval= in --source_args to patterns that share no"
                " file."
            )
        return found

    def _matching(self, options: dict, split: str, required: bool = True) -> list[str]:
        patterns = (options[split],) if options[split] else PATTERNS[split]
        for pattern in patterns:
            found = self._cache.glob(pattern) if self._cache else self._of_this_machine(pattern)
            if shown := sorted(path for path in found if not os.path.basename(path).startswith(".")):
                return shown
        if required:
            place, wanted = self._cache.url if self._cache else self._data_dir, " or ".join(patterns)
            raise DataError(
                f"--data_dir={place} has no file {wanted} for {split}: check the folder, or set"
                f" --source_args={split}=PATTERN (of files in a folder there, {split}=FOLDER/PATTERN)."
            )
        return []

    def _of_this_machine(self, pattern: str) -> list[str]:
        """Returns the local files that match. Wildcard characters in the folder's name are taken literally."""
        folder = re.sub(r"[*?\[\\]", r"\\\g<0>", self._data_dir)
        return [path for path in tf.io.gfile.glob(os.path.join(folder, pattern)) if not os.path.isdir(path)]

    def size(self, path: str) -> int:
        return self._cache.size(path) if self._cache else tf.io.gfile.stat(path).length

    def not_empty(self, paths: list[str]) -> list[str]:
        """Returns the files that are not empty, and notes their sizes for `records`."""
        self._sizes.update({path: self.size(path) for path in paths})
        return [path for path in paths if self._sizes[path]]

    def checksums(self, paths: list[str]) -> list[int]:
        """Returns a checksum of the files' names and sizes."""
        return [checksum_of(f"{os.path.basename(path)} {self.size(path)}".encode() for path in paths)]

    def checksum_of_heads(self, paths: list[str]) -> int:
        """Returns a checksum of the files' first bytes; of a part of the files, if they are in a store or thousands."""
        most, heads = SAMPLED if self._cache else _MOST_HEADS, dict[str, bytes]()

        def look(path: str) -> None:
            if self._cache:
                heads[path] = self._cache.piece(path, 0, min(_HEAD_BYTES, self.size(path)))
            else:
                with tf.io.gfile.GFile(path, "rb") as file:
                    heads[path] = file.read(_HEAD_BYTES)

        wanted = paths if len(paths) <= most else [paths[number] for number in sampled_rows(len(paths), most)]
        in_threads(look, [(path,) for path in wanted])
        return checksum_of(heads[path] for path in wanted)

    def at_random(self, paths: list[str]) -> RecordFiles | StoredRecords:
        """Returns the records of some files. Files in a store are copied to this machine first, if copies are kept."""
        if self._cache and not self._cache.copies:
            return StoredRecords(self._cache, paths)
        if self._cache:
            self._cache.bring(paths)
            return RecordFiles(paths, self._cache.named_copy)
        return RecordFiles(paths)

    def first_record(self, paths: list[str], compression: str) -> bytes | tf.Tensor | None:
        """Returns the first record of these files, or None if they have none."""
        if self._cache and not compression:
            self._cache.must_copy("stream=True")
            return first_of(self._cache, paths)
        if not compression:
            check_begin(paths[0])
        return next(iter(self.records(paths, compression, at_a_time=1).take(1)), None)

    def every_nth(self, paths: list[str], compression: str, first: int, n: int) -> tf.data.Dataset:
        """Returns the records of every nth file, from file number `first` on."""
        return self.records(paths[first::n], compression)

    def equal_shards(self, paths: list[str], compression: str) -> Callable[[int, int], tf.data.Dataset]:
        """Returns `every_nth` with a check that each nth has as many records as the others: see equal_shards.py."""

        @cache
        def of_the_first() -> int:
            return int(self.records(paths[:1], compression).reduce(tf.zeros([], tf.int64), as_is(lambda n, _: n + 1)))

        def shard(first: int, n: int) -> tf.data.Dataset:
            records = self.every_nth(paths, compression, first, n)
            return records if n == 1 else counted(records, of_the_first() * len(paths) // n)

        return shard

    def records(self, paths: list[str], compression: str, at_a_time: int = _CYCLE) -> tf.data.Dataset:
        """Returns the records of some files, read in turns, each from front to back."""
        if self._cache:
            self._cache.must_copy("stream=True")
            return stored_records(self._cache, paths, compression, at_a_time)
        compression_type: Any = compression
        names, numbers = tf.constant(paths, tf.string), tf.data.Dataset.range(len(paths))
        if compression:
            read = as_is(lambda number: tf.data.TFRecordDataset(names[number], compression_type))
        else:
            note_files(paths)
            sizes = [self._sizes.get(path) or self.size(path) for path in paths]
            whole = whole_records(sizes, paths.__getitem__)
            read = as_is(lambda number: whole(number, names[number]))
        return numbers.interleave(read, at_a_time, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _try(parse: Callable, record: bytes | tf.Tensor, name: str) -> None:
    """Parses one record now, so that a wrong x or y gives a clear error, not one from inside tf.data."""
    record = bytes(record.numpy()) if isinstance(record, tf.Tensor) else record
    try:
        parse(tf.constant([record]))
    except (tf.errors.InvalidArgumentError, ValueError) as error:
        try:
            stored = tf.train.Example.FromString(record).features.feature
            has = (
                ", ".join(f"{key}:{value.WhichOneof('kind')}" for key, value in sorted(stored.items())) or "no features"
            )
        except Exception:  # whatever the protobuf library raises for bytes that are not a message
            has = "no tf.train.Example"
        reason = cause(str(error))
        raise DataError(f"{name}: the first record ({has}) does not fit x and y of --source_args: {reason}") from error
