"""Which Runtime a configuration means. Adding one is a file and a line in RUNTIMES."""

from __future__ import annotations

from importlib import import_module

from tfdist.config import Config
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError, PeerLostError, StartupError
from tfdist.control.startup_deadline import connecting
from tfdist.runtime.base import Runtime
from tfdist.runtime.errors import explain

RUNTIMES: dict[str, str] = {
    "one_device": "tfdist.runtime.one_device:OneDevice",
    "mirrored": "tfdist.runtime.mirrored:Mirrored",
    "multi_worker": "tfdist.runtime.mirrored:MultiWorker",
    "horovod": "tfdist.runtime.horovod:Horovod",
    "sockets": "tfdist.runtime.sockets:Sockets",
    "mesh": "tfdist.runtime.mesh_runtime:MeshRuntime",
    "parameter_server": "tfdist.runtime.parameter_server:ParameterServer",
}


def create_runtime(config: Config, cluster: Cluster, began: float | None = None) -> Runtime:
    """Builds the runtime named by --strategy (`auto`: by what is there), in what is left of --startup_timeout since
    `began`.

    Raises: ConfigError if the name is unknown or does not fit the cluster; StartupError if a peer is lost meanwhile.
    """
    name = config.strategy.strategy
    if name == "auto":
        name = _choose(config, cluster)
    if name not in RUNTIMES:
        raise ConfigError(f"--strategy={name} is not one of auto, {', '.join(RUNTIMES)}.")
    if cluster.started_by and name != "horovod":
        raise ConfigError(
            f"--strategy={name}, but {cluster.started_by} started this process and tells no addresses: use"
            " --strategy=horovod, or start with tfdist.launch or TF_CONFIG."
        )
    config.check_compression(name)
    module, _, kind = RUNTIMES[name].partition(":")
    with connecting(cluster, config.cluster.startup_timeout, began):
        try:
            return getattr(import_module(module), kind).create(config, cluster)
        except Exception as error:
            lost = explain(error, cluster)
            if not isinstance(lost, PeerLostError):
                raise
            raise StartupError(f"Not all workers came together. {lost}") from error


def _choose(config: Config, cluster: Cluster) -> str:
    import tensorflow as tf

    if cluster.started_by:
        return "horovod"
    if cluster.size > 1:
        return "multi_worker"
    if config.strategy.virtual_devices > 1 or len(tf.config.list_physical_devices("GPU")) > 1:
        return "mirrored"
    return "one_device"
