"""Turns a name of source_names.py, or package.module:function, into a Split.

A new source is a file in this folder with `load(config, split) -> Split` and one line in source_names.py. A source is
imported only when it is used, so that its additional dependencies cost the others nothing.
"""

from __future__ import annotations

import dataclasses

from tfdist.config import Config, DataConfig
from tfdist.control.passing_errors import reading_failed
from tfdist.control.run_address import is_url
from tfdist.data.sources.source_names import SOURCES
from tfdist.data.sources.split import SPLITS, Split
from tfdist.plugins import resolve
from tfdist.storage.data_cache import data_cache
from tfdist.storage.store_errors import StoreError

_USER = "tfdist.data.sources.user:load"


def data_here(config: Config) -> DataConfig:
    """Returns the configuration for sources. If --data_dir is in an object store, it becomes the local folder for
    copies, into which storage/data_cache.py fetches what a source asks for. Raises ConfigError, StartupError."""
    data = config.data
    if not is_url(data.data_dir):
        return data
    cache = data_cache(data.data_dir, config.run.cache_dir, data.cache_gb * 1e9, data.cache_data)
    return dataclasses.replace(data, data_dir=str(cache.folder))


def load_split(config: DataConfig, split: str) -> Split:
    """Loads the "train" or "eval" split of `--source`. Raises ConfigError for an unknown name, DataError for bad data,
    StartupError for data that cannot be read now."""
    assert split in SPLITS, split
    load = resolve("source", _USER if ":" in config.source else config.source, SOURCES)
    try:
        return load(config, split).check()
    except StoreError:
        raise
    except OSError as error:
        words = f"--source={config.source} cannot be read ({error}): check --data_dir and --source_args."
        raise reading_failed(words, error) from error
