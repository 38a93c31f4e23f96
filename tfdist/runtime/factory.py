"""Creates the Runtime for a configuration: chooses the strategy, and starts it.

TensorFlow is not imported before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tfdist.config import Config
from tfdist.config.strategies import Strategy, is_own, strategy_named, strategy_or_undecided
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ConfigError, PeerLostError, StartupError, TfdistError
from tfdist.control.startup_deadline import connecting
from tfdist.control.user_errors import failure
from tfdist.plugins import imported
from tfdist.runtime.mesh import Mesh

if TYPE_CHECKING:
    from tfdist.runtime.base import Runtime


_has_started = False


def _gpus_of_this_process() -> int:
    import tensorflow as tf

    return len(tf.config.list_physical_devices("GPU"))


def resolve_strategy(config: Config, cluster: Cluster, gpus: Callable[[], int] = _gpus_of_this_process) -> str:
    """Returns the name of the strategy: the value of --strategy, or, for `auto`, what suits the cluster and devices.

    gpus: returns how many GPUs this process sees; called only if it matters, since it starts TensorFlow.
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


def replicas_of(config: Config, workers: int, local: int) -> int:
    """Number of model copies in a run that has not begun, with `local` per worker unless a mesh defines it. Raises
    ConfigError if the mesh does not fit this number of workers."""
    is_mesh = strategy_or_undecided(config.strategy.strategy).mesh
    return Mesh.parse(config.parallel.mesh, workers).replicas if is_mesh else workers * local


def create_runtime(config: Config, cluster: Cluster, began: float | None) -> Runtime:
    """Builds the runtime of --strategy, in what is left of --startup_timeout since `began`.

    Raises: ConfigError if the name is unknown or does not fit the cluster; StartupError if a peer is lost meanwhile.
    """
    name = resolve_strategy(config, cluster)
    strategy = strategy_named(name)
    if cluster.started_by and not strategy.finds_workers:
        raise ConfigError(
            f"--strategy={name}, but {cluster.started_by} started this process and gives no addresses: use"
            " --strategy=horovod, or start with tfdist.launch or TF_CONFIG."
        )
    if cluster.size > 1 and not strategy.several_workers:
        raise ConfigError(
            f"--strategy={name} trains in one process, but TF_CONFIG lists {cluster.size} workers: use"
            " --strategy=multi_worker, or unset TF_CONFIG."
        )
    config.check_compression(name)
    kind = _class_of(name, strategy)
    with connecting(cluster, config.cluster.startup_timeout, began):
        try:
            runtime = kind.create(config, cluster)
        except Exception as error:
            from tfdist.runtime.errors import explain

            lost = explain(error, cluster)
            if isinstance(lost, PeerLostError):
                raise StartupError(f"Not all workers came together. {lost}") from error
            if is_own(name) and not isinstance(error, TfdistError):
                raise ConfigError(f"--strategy={name} {failure(error)}") from error
            raise
    if is_own(name):
        _check_complete(name, runtime)
        if (runtime.rank, runtime.size) != (cluster.rank, cluster.size):
            raise ConfigError(
                f"--strategy={name}: its runtime reports that it is rank {runtime.rank} of {runtime.size}, but this is"
                f" rank {cluster.rank} of {cluster.size} workers: take rank and size from the cluster, or set"
                " Strategy(..., several_workers=False)."
            )
    global _has_started
    _has_started = True
    return runtime


def has_started() -> bool:
    """Whether this process has created a runtime."""
    return _has_started


def _class_of(name: str, strategy: Strategy) -> Any:
    """Returns the class that `strategy.runtime` names. Raises ConfigError if a user's own class does not exist."""
    module, _, kind = strategy.runtime.partition(":")
    if not is_own(name):
        return getattr(import_module(module), kind)
    found = imported("strategy", name, strategy.runtime)
    if found is None:
        raise ConfigError(f"--strategy={name}: the module {module} has no class {kind!r}.")
    _check_complete(name, found, ("create",))
    return found


def _check_complete(name: str, what: Any, more: Sequence[str] = ()) -> None:
    """Raises ConfigError unless a class, or an object with its attributes, has all that the protocol requires."""
    from tfdist.runtime.base import Runtime

    wanted = [*more, *(method for method in vars(Runtime) if not method.startswith("_"))]
    if not isinstance(what, type):
        wanted += Runtime.__annotations__
    if lacking := sorted(each for each in wanted if not hasattr(what, each)):
        raise ConfigError(
            f"--strategy={name}: {what.__name__ if isinstance(what, type) else type(what).__name__} lacks"
            f" {', '.join(lacking)}, which tfdist/runtime/base.py describes: add them, or inherit them from"
            " tfdist.runtime.single_replica.SingleReplica."
        )
