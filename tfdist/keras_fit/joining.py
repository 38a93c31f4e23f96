"""How a process joins the other workers of a tfdist.fit, once, and the calls that all workers make together."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, TypeGuard

from tfdist.compat.keras_addition import add_rows_to_rows
from tfdist.config import Config, check_option, iter_options
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import ClusterError, ConfigError, TfdistError
from tfdist.control.preflight import wait_for_peers
from tfdist.control.resolvers import cluster_to_join
from tfdist.control.startup_deadline import connecting
from tfdist.control.token import with_token
from tfdist.keras_fit.local_gpus import CHOICES, use_all
from tfdist.models.compiled_functions import compile_functions
from tfdist.models.fused_attention import fuse_attention
from tfdist.runtime.base import PeerRuntime, Runtime
from tfdist.runtime.errors import explain
from tfdist.runtime.one_device import OneDevice
from tfdist.runtime.peer_choice import ConnectedPeers
from tfdist.runtime.peers import Peers, warn_about_gpus

_OPTIONS = ("startup_timeout", "heartbeat_timeout", "collective_timeout", "pack_mb", "communication", "job_token_file")
# Arguments that must be equal on all workers, besides the data; `verbose` and the callbacks may differ.
_COMMON = (
    "batch_size",
    "epochs",
    "validation_split",
    "shuffle",
    "class_weight",
    "initial_epoch",
    "steps_per_epoch",
    "steps",
    "validation_steps",
    "validation_batch_size",
    "validation_freq",
)
_runtime: Runtime | None = None  # of this process, created once
_calls = 0  # number of calls that this process has made together with all workers


def init(*, local_gpus: str = "all", **options: float | str) -> Runtime:
    """Joins the other workers that TF_CONFIG lists; without it, this process works alone. The first fit, evaluate or
    predict calls this if the script has not.

    Args:
        local_gpus: "all": a script that is alone on a machine with several GPUs, and calls this before TensorFlow
            computes anything, is started again on one worker for each GPU. "one": it is not.
        options: by the names and with the meaning of the flags: startup_timeout, heartbeat_timeout, collective_timeout
            (seconds), pack_mb (MB), communication, job_token_file.
    Raises: ClusterError, StartupError, ConfigError.
    """
    global _runtime
    if _runtime is None:
        fuse_attention()
        compile_functions()
        add_rows_to_rows()
        for name in options:
            if name not in _OPTIONS:
                raise ConfigError(f"tfdist.init({name}=...) is not an option: use local_gpus, {', '.join(_OPTIONS)}.")
            _check_option(name, options[name])
        if local_gpus not in CHOICES:
            raise ConfigError(f"tfdist.init(local_gpus={local_gpus!r:.80}): use {' or '.join(map(repr, CHOICES))}.")
        config = Config().replace(**options)
        cluster = with_token(cluster_to_join(os.environ), os.environ, config.cluster.job_token_file)
        if cluster.rank < 0:
            raise ClusterError(
                'TF_CONFIG: task.type is "evaluator", which takes no part in tfdist.fit: list chief and worker only.'
            )
        if cluster.size > 1:
            began = time.monotonic()
            wait_for_peers(cluster, config.cluster.startup_timeout)
            with connecting(cluster, config.cluster.startup_timeout, began):
                _runtime = ConnectedPeers.create(config, cluster)
            atexit.register(_leave, _runtime)
            warn_about_gpus(cluster.rank)
        else:
            use_all(local_gpus)
            _runtime = OneDevice()
    elif options:
        raise ConfigError(
            f"tfdist.init({', '.join(options)}) comes too late: call it before the first fit, evaluate or predict."
        )
    return _runtime


def has_joined() -> bool:
    """Whether this process has joined the others, or found that it is alone."""
    return _runtime is not None


def _check_option(name: str, value: Any) -> None:
    field = next(field for _, field in iter_options() if field.name == name)
    kinds, words = (str, "a string") if isinstance(field.default, str) else ((int, float), "a number")
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ConfigError(f"tfdist.init({name}={value!r:.80}): give {words}.")
    check_option(field, value)


def _leave(runtime: PeerRuntime) -> None:
    if not hasattr(sys, "last_type"):  # else an error ended the script, and it must look like that to the others
        runtime.leave()


def agree_on(runtime: Runtime, name: str, arguments: dict[str, Any]) -> None:
    """Raises ConfigError if another worker makes another call, or has ended."""
    global _calls
    _calls += 1
    if has_peers(runtime):
        given = {key: arguments.get(key) for key in _COMMON}
        said = ", ".join(
            f"{key}={value!r}" for key, value in given.items() if value is not None and str(value) not in ("False", "0")
        )
        try:
            with explained(runtime):
                runtime.agree_on(f"call {_calls}, tfdist.{name}({said})")
        except ConfigError as error:
            raise ConfigError(f"tfdist.{name}: {error}") from None


def barrier() -> None:
    """Returns when all workers have called it: work done before it, such as saving a file, is then done for all."""
    agree_on(init(), "barrier", {})


def is_chief() -> bool:
    """Whether this worker is rank 0, which writes the files. Only reads TF_CONFIG; does not join the workers."""
    return cluster_to_join(os.environ).is_chief


def has_peers(runtime: Runtime) -> TypeGuard[Peers]:
    """Whether there are several workers; with several, `init` returns a runtime that can gather rows."""
    return runtime.size > 1


@contextlib.contextmanager
def explained(runtime: Runtime) -> Iterator[None]:
    """Context manager that turns errors of the runtime into messages about the workers."""
    try:
        yield
    except TfdistError:
        raise
    except Exception as error:
        sentence = explain(error, runtime.cluster if has_peers(runtime) else Cluster())
        if sentence is None:
            raise
        raise sentence from error
