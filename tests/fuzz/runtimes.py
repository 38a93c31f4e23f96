"""The runtimes of one worker process of the fuzzer: each is made once, however many cases it then runs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from tests.fuzz import gpu_form, hosts
from tests.fuzz.space import strategy_flags
from tfdist.config import Config
from tfdist.control.cluster import Cluster

MOST_DEVICES = 3  # of a mirrored runtime
PATIENCE = {"collective_timeout": 60.0, "heartbeat_timeout": 60.0}


class Runtimes:
    """Makes the runtimes that cases need."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self._made: dict[str, Any] = {}

    def get(self, case: Mapping[str, Any]) -> Any:
        """Returns the runtime of a case. Cases on the same runtime share it; only meshes are made for each case, over
        the same cluster.
        """
        kind, _, count = case["runtime"].partition(":")
        if kind == "mirrored":
            return self._once(case["runtime"], lambda: self._mirrored(int(count)))
        if kind == "mesh":
            return self._mesh(case)
        if kind == "fit":  # as tfdist.init chooses
            kind = "sockets" if self.cluster.size > 1 else "one_device"
        if kind == "fit_ring":  # TensorFlow's collectives, which a process must start first
            return self._once(kind, lambda: self._start(strategy="sockets", communication="ring"))
        with hosts.two(self.cluster) if kind == "sockets_hosts" else contextlib.nullcontext():
            return self._once(kind, lambda: self._start(**strategy_flags(kind)))

    def _once(self, name: str, make) -> Any:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def _start(self, **options: Any) -> Any:
        from tfdist import build

        if options["strategy"] == "multi_worker" and gpu_form.is_real():  # NCCL allows only one process per GPU
            options["communication"] = "ring"
        config = Config().replace(steps=1, **PATIENCE, **options)
        if options["strategy"] == "parameter_server":
            from tfdist.runtime import parameter_server

            config = parameter_server.prepare(config, self.cluster)
        return build.start_runtime(config, self.cluster)

    def _mesh(self, case: Mapping[str, Any]) -> Any:
        from tfdist.runtime.mesh import Mesh
        from tfdist.runtime.mesh_runtime import MeshRuntime

        world = self._once("multi_worker", lambda: self._start(strategy="multi_worker"))
        return MeshRuntime(
            Mesh.parse(case["options"].get("mesh", ""), self.cluster.size),
            self.cluster,
            world,
            PATIENCE["collective_timeout"],
        )

    def _mirrored(self, devices: int) -> Any:
        """Makes it like tfdist.runtime.mirrored, but with only some of the devices that this process has."""
        import tensorflow as tf

        from tfdist.runtime.mirrored import Mirrored, communication_options

        class Strategy(tf.distribute.MirroredStrategy):
            """Numbers its device groups apart: TensorFlow counts them from 1 on for every strategy of a process."""

            def __init__(self, names: list[str]):
                self._collective_key_base = 1000 * len(names)
                super().__init__(names)

        strategy = Strategy([f"CPU:{index}" for index in range(devices)])
        return Mirrored(strategy, communication_options(Config().strategy), rank=0, size=1)


def prepare_devices() -> None:
    """Makes as many virtual devices as any runtime here needs. Must be called before TensorFlow starts."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * MOST_DEVICES)
