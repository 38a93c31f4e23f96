"""The names of the data sources, and how a name, or package.module:function, becomes a Split.

A new source is a file in this folder with `load(config, split) -> Split` and one line in source_names.py. Sources are
imported when they are asked for, so that one with additional dependencies costs the others nothing.
"""

from __future__ import annotations

from tfdist.config import DataConfig
from tfdist.data.sources.source_names import SOURCES
from tfdist.data.sources.split import SPLITS, Split
from tfdist.plugins import resolve

_USER = "tfdist.data.sources.user:load"


def load_split(config: DataConfig, split: str) -> Split:
    """The "train" or "eval" split of `--source`. Raises ConfigError for an unknown name, DataError for bad data."""
    assert split in SPLITS, split
    load = resolve("source", _USER if ":" in config.source else config.source, SOURCES)
    return load(config, split).check()
