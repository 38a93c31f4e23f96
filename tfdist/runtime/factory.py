"""From a configuration to a running Runtime: which strategy it means, and the start.

TensorFlow is not imported before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError, PeerLostError, StartupError
from tfdist.control.startup_deadline import connecting
from tfdist.control.strategies import strategy_named

if TYPE_CHECKING:
    from tfdist.runtime.base import Runtime


def _gpus_of_this_process() -> int:
    import tensorflow as tf

    return len(tf.config.list_physical_devices("GPU"))


def resolve_strategy(config: Config, cluster: Cluster, gpus: Callable[[], int] = _gpus_of_this_process) -> str:
    """The strategy that --strategy means: its name, or with `auto` what is there.

    gpus: how many this process sees, asked only if it matters, since TensorFlow then starts.
    """
    if config.strategy.strategy != "auto":
        return config.strategy.strategy
    if "ps" in cluster.spec:
        return "parameter_server"
    if cluster.started_by:
        return "horovod"
    if cluster.size > 1:
        return "multi_worker"
    return "mirrored" if config.strategy.virtual_devices > 1 or gpus() > 1 else "one_device"


def create_runtime(config: Config, cluster: Cluster, began: float | None) -> Runtime:
    """Builds the runtime that --strategy means, in what is left of --startup_timeout since `began`.

    Raises: ConfigError if the name is unknown or does not fit the cluster; StartupError if a peer is lost meanwhile.
    """
    name = resolve_strategy(config, cluster)
    strategy = strategy_named(name)
    if cluster.started_by and not strategy.finds_workers:
        raise ConfigError(
            f"--strategy={name}, but {cluster.started_by} started this process and tells no addresses: use"
            " --strategy=horovod, or start with tfdist.launch or TF_CONFIG."
        )
    config.check_compression(name)
    module, _, kind = strategy.runtime.partition(":")
    with connecting(cluster, config.cluster.startup_timeout, began):
        try:
            return getattr(import_module(module), kind).create(config, cluster)
        except Exception as error:
            from tfdist.runtime.errors import explain

            lost = explain(error, cluster)
            if not isinstance(lost, PeerLostError):
                raise
            raise StartupError(f"Not all workers came together. {lost}") from error
