"""A feature of tf.train.Example records, as named in --source_args: FEATURE:KIND[SHAPE] (see tfrecord.py)."""

from __future__ import annotations

import re
from dataclasses import dataclass

import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.data.sources import images

_LISTS = {"float32": tf.float32, "int64": tf.int64, "int32": tf.int64}
_RAW = ("uint8", "int8", "uint16", "int16", "float16", "float64", "raw_float32", "raw_int32", "raw_int64")


@dataclass(frozen=True)
class RecordField:
    """One feature of the records: its name, how it is stored, its shape."""

    feature: str
    kind: str
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, option: str, text: str) -> RecordField:
        match = re.fullmatch(r"([^:]+):(\w+)(?:\[([\d, ]*)\])?", text)
        if not match or match[2] not in (*_LISTS, *_RAW, "image"):
            raise ConfigError(
                f"--source_args: {option}={text!r} must be FEATURE:KIND[SHAPE], for example"
                f" {option}=image:uint8[28,28,1], with KIND one of {', '.join((*_LISTS, *_RAW, 'image'))}."
            )
        shape = tuple(int(n) for n in (match[3] or "").split(",") if n.strip())
        if match[2] == "image" and (len(shape) != 3 or shape[0] != shape[1]):
            raise ConfigError(
                f"--source_args: {option}={text}: an image needs its size and channels, for example image[224,224,3]."
            )
        return cls(match[1], match[2], shape)

    @property
    def spec(self) -> tf.TensorSpec:
        dtype = "float32" if self.kind == "image" else self.kind.removeprefix("raw_")
        return tf.TensorSpec(self.shape, tf.as_dtype(dtype))

    @property
    def spec_of_x(self) -> tf.TensorSpec:
        image = self.kind == "uint8" and len(self.shape) == 3
        return tf.TensorSpec(self.shape, tf.float32) if image else self.spec

    @property
    def parser(self) -> tf.io.FixedLenFeature:
        stored = _LISTS.get(self.kind, tf.string)
        return tf.io.FixedLenFeature(self.shape if self.kind in _LISTS else [], stored)

    def decode(self, parsed: dict[str, tf.Tensor], seeds: tf.Tensor | None) -> tf.Tensor:
        """Returns the parsed feature as a tensor [n, *shape]."""
        value = parsed[self.feature]
        if self.kind in _LISTS:
            return tf.cast(value, self.spec.dtype)
        if self.kind == "image":
            size, channels = self.shape[1:]
            if seeds is None:
                return images.decode(value, size, channels)
            return images.decode_cropped(value, seeds, size, channels)
        # The number of rows, not -1: records that are too long by an integer factor must not become more rows.
        return tf.reshape(tf.io.decode_raw(value, self.spec.dtype), [tf.shape(value)[0], *self.shape])
