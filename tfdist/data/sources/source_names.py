"""The names of the data sources, and where their functions are.

No TensorFlow: an unknown name is reported at once.
"""

from __future__ import annotations

SOURCES = {
    "digits": "tfdist.data.sources.digits:load",
    "synthetic": "tfdist.data.sources.synthetic:load",
    "text": "tfdist.data.sources.text:load",
    "tfds": "tfdist.data.sources.tfds:load",
    "tfrecord": "tfdist.data.sources.tfrecord:load",
}
