"""The runtimes of one worker process of the fuzzer: each made once, however many cases it then runs."""

from __future__ import annotations

from typing import Any

from tfdist.config import Config
from tfdist.control.cluster import Cluster

MOST_DEVICES = 3  # of mirrored
PATIENCE = {"collective_timeout": 60.0, "heartbeat_timeout": 60.0}


class Runtimes:
    """Makes runtimes by the names of space.RUNTIMES."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self._made: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        name = name if name.startswith("mirrored") else name.partition(":")[0]
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Any:
        from tfdist import build

        kind, _, count = name.partition(":")
        if kind == "mirrored":
            return self._mirrored(int(count))
        return build.start_runtime(self._config(kind), self.cluster)

    def _config(self, kind: str) -> Config:
        return Config().replace(strategy=kind, steps=1, **PATIENCE)

    def _mirrored(self, devices: int) -> Any:
        """As tfdist.runtime.mirrored makes it; but some of the devices that this process has."""
        import tensorflow as tf

        from tfdist.runtime.mirrored import Mirrored, communication_options

        strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(devices)])
        return Mirrored("mirrored", strategy, communication_options(self._config("mirrored").strategy), rank=0, size=1)


def prepare_devices() -> None:
    """Before TensorFlow starts: as many virtual devices as any runtime here needs."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * MOST_DEVICES)
