"""The machines for which plans are made: a table of GPUs and networks, and the user's own.

Units: memory GB = 1e9 bytes; arithmetic TFLOP/s = 1e12 operations per second, dense; bandwidths GB/s in ONE direction
(NVIDIA's NVLink figures count both). Sources: the vendors' data sheets.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tfdist.config import parse_args
from tfdist.control.exit_codes import ConfigError


@dataclass(frozen=True)
class Hardware:
    """A device, the node it is in, and the network between nodes.

    Assumed values are marked as such; --calibrate replaces some of them by measurements.
    """

    name: str
    memory_gb: float  # of one device
    half_tflops: float  # bfloat16 (float16 on devices without it), matrix units
    float32_tflops: float  # float32 products as TensorFlow runs them: TF32 where the device has it
    memory_gbs: float  # bandwidth of the device's memory
    link_gbs: float  # between the devices of a node, per device
    per_node: int = 8  # devices in a node
    network_gbs: float = 50.0  # between nodes, per network card
    cards: int = 8  # network cards in a node
    bfloat16: bool = True
    link_us: float = 3.0  # latency of a message within the node (assumed)
    network_us: float = 8.0  # the same between nodes (assumed)
    reserved_gb: float = 1.5  # memory for CUDA, cuBLAS and NCCL (assumed)
    efficiency: float = 0.45  # fraction of the peak that the model's products reach (assumed)
    overlap: float = 0.8  # fraction of the backward pass behind which communication can hide (assumed)
    step_ms: float = 2.0  # fixed cost of an optimizer step (assumed)
    storage_gbs: float = 2.0  # rate at which one job writes to the checkpoint storage (assumed)
    # For one device with its share of everything else: Llama 3 405B saw 419 failures in 54 days on 16,384 GPUs
    # (arXiv:2407.21783, section 3.3.4)
    mtbf_hours: float = 50_000.0
    copies: int = 0  # of a tensor in transit, held by the transport: gRPC holds two at the sender, two at the receiver
    # Processors for all workers together (a CPU machine); more workers than this share them. 0: each has its own.
    shared: int = 0

    def tflops(self, precision: str) -> float:
        return self.float32_tflops if precision == "float32" else self.half_tflops

    def crowding(self, workers: int) -> int:
        """Returns the number of workers on the fullest processor. The launcher gives each worker whole cores
        (machine_shares.divide_cores), and all wait for the slowest: 3 workers on 2 processors take as long as 4."""
        return max(1, -(-workers // self.shared)) if self.shared else 1

    @property
    def node_gbs(self) -> float:
        """Bandwidth of a node into the network."""
        return self.network_gbs * self.cards


DEVICES: dict[str, Hardware] = {
    device.name: device
    for device in (
        Hardware(
            "v100",
            memory_gb=32,
            half_tflops=125,
            float32_tflops=15.7,
            memory_gbs=900,
            link_gbs=150,
            network_gbs=12.5,
            cards=4,
            bfloat16=False,
        ),
        Hardware(
            "t4",
            memory_gb=16,
            half_tflops=65,
            float32_tflops=8.1,
            memory_gbs=320,
            link_gbs=12,
            per_node=4,
            network_gbs=6.25,
            cards=1,
            bfloat16=False,
        ),
        Hardware(
            "l4",
            memory_gb=24,
            half_tflops=121,
            float32_tflops=60,
            memory_gbs=300,
            link_gbs=24,
            per_node=8,
            network_gbs=12.5,
            cards=1,
        ),
        Hardware(
            "a10g",
            memory_gb=24,
            half_tflops=70,
            float32_tflops=35,
            memory_gbs=600,
            link_gbs=24,
            per_node=8,
            network_gbs=12.5,
            cards=1,
        ),
        Hardware(
            "l40s",
            memory_gb=48,
            half_tflops=362,
            float32_tflops=183,
            memory_gbs=864,
            link_gbs=24,
            per_node=8,
            network_gbs=25,
            cards=2,
        ),
        Hardware(
            "a100-40", memory_gb=40, half_tflops=312, float32_tflops=156, memory_gbs=1555, link_gbs=300, network_gbs=25
        ),
        Hardware(
            "a100", memory_gb=80, half_tflops=312, float32_tflops=156, memory_gbs=2039, link_gbs=300, network_gbs=25
        ),
        Hardware(
            "h100", memory_gb=80, half_tflops=989, float32_tflops=495, memory_gbs=3350, link_gbs=450, network_gbs=50
        ),
        Hardware(
            "h200", memory_gb=141, half_tflops=989, float32_tflops=495, memory_gbs=4800, link_gbs=450, network_gbs=50
        ),
        Hardware(
            "b200", memory_gb=180, half_tflops=2250, float32_tflops=1125, memory_gbs=8000, link_gbs=900, network_gbs=50
        ),
        Hardware(
            "cpu",
            memory_gb=8,
            half_tflops=0.05,
            float32_tflops=0.1,
            memory_gbs=20,
            link_gbs=5,
            per_node=1,
            network_gbs=1.25,
            cards=1,
            network_us=50,
            reserved_gb=0.5,
            efficiency=0.5,
            overlap=0.5,
            step_ms=3.0,
            copies=4,
        ),
    )
}


class Network(NamedTuple):
    """GB/s per card in one direction, and latency in microseconds."""

    network_gbs: float
    network_us: float


# InfiniBand: HDR 200, NDR 400, XDR 800 Gbit/s; Ethernet: Gbit/s as in the name.
NETWORKS: dict[str, Network] = {
    "ib-hdr": Network(25.0, 6.0),
    "ib-ndr": Network(50.0, 6.0),
    "ib-xdr": Network(100.0, 6.0),
    "ethernet-10": Network(1.25, 30.0),
    "ethernet-25": Network(3.125, 30.0),
    "ethernet-100": Network(12.5, 20.0),
    "ethernet-400": Network(50.0, 15.0),
}


def load_hardware(text: str) -> Hardware:
    """Reads `NAME`, `NAME,key=value,...`, `key=value,...` with at least `name`, or the path of a JSON object with the
    same keys.

    Keys are the fields of Hardware, and `network`, a name in NETWORKS. In a JSON file, "base" is the NAME.
    Raises ConfigError for an unknown name or key, or an impossible value.
    """
    if text.endswith(".json"):
        try:
            values: dict[str, Any] = json.loads(Path(text).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(
                f"--hardware={text} cannot be read as JSON ({error}): give a file that contains one object, or a name"
                f" of {', '.join(DEVICES)}."
            ) from None
        if not isinstance(values, dict):
            raise ConfigError(
                f'--hardware={text} contains no JSON object: write for example {{"base": "h100", "per_node": 4}}.'
            )
        base = values.pop("base", None)
    else:
        first, _, rest = text.partition(",")
        base, changes = (None, text) if "=" in first else (first, rest)
        values = parse_args("hardware", changes)
    return _with(text, base, values)


def _with(text: str, base: str | None, values: dict[str, Any]) -> Hardware:
    if base is not None and base not in DEVICES:
        raise ConfigError(
            f"--hardware={text}: {base!r} is not in the table: use {', '.join(DEVICES)}, or key=value,key=value for"
            " your own."
        )
    fields = {field.name: field for field in dataclasses.fields(Hardware)}
    network = values.pop("network", None)
    if network is not None:
        if network not in NETWORKS:
            raise ConfigError(
                f"--hardware={text}: network={network} is not in the table: use {', '.join(NETWORKS)}, or network_gbs"
                " and network_us."
            )
        values = {**NETWORKS[network]._asdict(), **values}
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(f"--hardware={text}: {name!r} is not known: use {', '.join(fields)} or network.")
        if name == "bfloat16" and not isinstance(value, bool):
            raise ConfigError(f"--hardware={text}: bfloat16={value!r} must be True or False.")
        if name not in ("name", "bfloat16") and not (
            isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        ):
            raise ConfigError(f"--hardware={text}: {name}={value!r} must be a number, 0 or more.")
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in values]
    if base is None and missing:
        raise ConfigError(
            f"--hardware={text} lacks {', '.join(missing)}: add them, or start with a name of the table, for example"
            f" h100,{text}."
        )
    hardware = dataclasses.replace(DEVICES[base], **values) if base else Hardware(**values)
    for name in (
        "memory_gb",
        "half_tflops",
        "float32_tflops",
        "memory_gbs",
        "link_gbs",
        "per_node",
        "network_gbs",
        "cards",
        "efficiency",
        "storage_gbs",
        "mtbf_hours",
    ):
        if not getattr(hardware, name) > 0:
            raise ConfigError(f"--hardware={text}: {name}={getattr(hardware, name)} must be above 0.")
    return hardware
