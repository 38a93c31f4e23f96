"""The registry of strategies: where the Runtime of each is, and what must be known before TensorFlow is imported.

A new strategy is a file with a class that implements the protocol in runtime/base.py, and an entry here. A user-defined
strategy has its entry in a file outside of tfdist (`--strategy=package.module:NAME`, examples/own_runtime.py). The
capabilities of a started runtime are attributes or methods of that protocol.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache

from tfdist.control.exit_codes import ConfigError
from tfdist.plugins import check_name, imported


@dataclass(frozen=True)
class Strategy:
    """The meaning of --strategy=NAME."""

    runtime: str  # "module:Class"; Class.create(config, cluster) makes the runtime
    several_workers: bool = True  # whether it can have more than one worker
    parameter_servers: bool = False  # whether workers send gradients to servers, not to each other
    mesh: bool = False  # whether workers have coordinates of named axes (--mesh)
    finds_workers: bool = False  # whether horovodrun or mpirun may start it, without addresses
    restarts_in_process: bool = False  # whether a process can leave one group of workers and join another
    compression: tuple[str, ...] = ()  # the kinds of --compression that it supports
    compression_fix: str = "drop it"  # what to do instead of the other kinds

    @property
    def exchanges(self) -> bool:
        """Whether workers exchange data with each other."""
        return self.several_workers and not self.parameter_servers


_OTHER_COMPRESSION = "use --compression=bf16, or --strategy=mesh"
STRATEGIES: dict[str, Strategy] = {
    "one_device": Strategy("tfdist.runtime.one_device:OneDevice", several_workers=False),
    "mirrored": Strategy(
        "tfdist.runtime.mirrored:Mirrored",
        several_workers=False,
        compression=("bf16",),
        compression_fix=_OTHER_COMPRESSION,
    ),
    "multi_worker": Strategy(
        "tfdist.runtime.multi_worker:MultiWorker", compression=("bf16",), compression_fix=_OTHER_COMPRESSION
    ),
    "horovod": Strategy(
        "tfdist.runtime.horovod:Horovod",
        finds_workers=True,
        restarts_in_process=True,
        compression_fix="use --horovod_compression=fp16",
    ),
    "sockets": Strategy(
        "tfdist.runtime.peer_choice:ConnectedPeers", compression=("bf16",), compression_fix=_OTHER_COMPRESSION
    ),
    "mesh": Strategy(
        "tfdist.runtime.mesh_runtime:MeshRuntime", mesh=True, compression=("fp16", "bf16", "int8", "topk", "powersgd")
    ),
    "parameter_server": Strategy("tfdist.runtime.parameter_server:ParameterServer", parameter_servers=True),
}
_UNDECIDED = Strategy("", several_workers=False, compression_fix=_OTHER_COMPRESSION)


def is_own(name: str) -> bool:
    """Whether --strategy=NAME is user-defined: "package.module:NAME" or "path/of/a/file.py:NAME"."""
    return ":" in name


def strategy_named(name: str) -> Strategy:
    """Returns the strategy of this name. Raises ConfigError if there is none."""
    if is_own(name):
        return _own(name)
    if name not in STRATEGIES:
        raise ConfigError(f"--strategy={name} is not one of auto, {', '.join(STRATEGIES)}, or package.module:NAME.")
    return STRATEGIES[name]


def check_strategy(name: str) -> None:
    """Raises ConfigError for a name that --strategy does not know."""
    if name != "auto":
        strategy_named(name)


def strategy_or_undecided(name: str) -> Strategy:
    """The strategy --strategy=NAME if it is certain before the cluster is known; `_UNDECIDED` for auto and unknown
    names."""
    return _own(name) if is_own(name) else STRATEGIES.get(name, _UNDECIDED)


@cache
def _own(name: str) -> Strategy:
    """Returns the entry in a user's file. Raises ConfigError if it is not one."""
    before = "tensorflow" in sys.modules
    check_name("strategy", name, STRATEGIES)
    found = imported("strategy", name, name)
    if not isinstance(found, Strategy):
        raise ConfigError(
            f"--strategy={name} is not an entry of the registry: write {name.rpartition(':')[2]} ="
            ' tfdist.config.strategies.Strategy("module:Class") in its file, as examples/own_runtime.py does.'
        )
    if "tensorflow" in sys.modules and not before:
        raise ConfigError(
            f"--strategy={name}: its file imports TensorFlow, before tfdist has set it up: import it within functions,"
            " or keep the entry in a file of its own."
        )
    return found
