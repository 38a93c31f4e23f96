"""Checks the workers of a cluster together: do they reach each other, do their clocks, versions and devices match, does
an all-reduce give the right sum, and how fast?
"""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.config import Config
from tfdist.control import preflight
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import TfdistError
from tfdist.control.terminal import printable
from tfdist.control.token import host_of
from tfdist.diagnosis.findings import Finding, fine, warning, wrong

_MOST_SECONDS_APART = 5.0  # between clocks; certificates, leases and logs suffer from more
_NUMBERS = 2**22  # float32 numbers in the all-reduce


@dataclasses.dataclass(frozen=True)
class WorkerReport:
    """The facts that each worker sends to the others."""

    rank: int
    gpus: int
    versions: str
    findings: tuple[Finding, ...]
    clock: float = 0.0  # Unix seconds at the time when all were asked

    def encoded(self) -> bytes:
        return json.dumps({**dataclasses.asdict(self), "findings": [each.as_dict() for each in self.findings]}).encode()

    @classmethod
    def decoded(cls, data: bytes) -> WorkerReport:
        """Raises ValueError, KeyError or TypeError for data that no doctor has sent."""
        fields: dict[str, Any] = json.loads(data)
        findings = tuple(
            Finding(each.name, each.state, printable(each.what), printable(each.fix))
            for each in map(Finding.from_dict, fields["findings"])
        )
        return cls(
            int(fields["rank"]), int(fields["gpus"]), printable(fields["versions"]), findings, float(fields["clock"])
        )


def addresses(cluster: Cluster) -> list[Finding]:
    """Checks whether the addresses in TF_CONFIG are valid here, before waiting for anyone."""
    findings = []
    for rank, address in enumerate(cluster.peers):
        try:
            socket.getaddrinfo(host_of(address), None)
        except (OSError, UnicodeError) as error:
            findings.append(
                wrong(
                    "addresses",
                    f"the host of {cluster.name(rank)} is not known here ({error}).",
                    "fix the address in TF_CONFIG, or the name service of this machine.",
                )
            )
    own_address = cluster.peers[cluster.rank]
    if not findings and not preflight.is_local(host_of(own_address)):
        findings.append(
            warning(
                "addresses",
                f"{own_address}, this worker's in TF_CONFIG, does not belong to this machine.",
                "fix TF_CONFIG, unless a service in front of this machine has that address.",
            )
        )
    return findings


def meet(
    config: Config, cluster: Cluster, mine: WorkerReport, clock: Callable[[], float] = time.time
) -> tuple[list[WorkerReport], list[Finding]]:
    """Returns (reports in rank order, findings about all); if the workers cannot meet, only this worker's report."""
    from tfdist.runtime.ring.control_ring import ControlRing
    from tfdist.runtime.ring.ring import Ring
    from tfdist.runtime.ring.ring_error import RingError

    try:
        preflight.wait_for_peers(cluster, config.cluster.startup_timeout)
        control = ControlRing(config, cluster)
        try:
            begun = time.monotonic()
            control.gather(b"", "ready")
            asked = dataclasses.replace(mine, clock=clock())
            reports = [WorkerReport.decoded(bytes(data)) for data in control.gather(asked.encoded(), "told")]
            uncertain = time.monotonic() - begun
            ring = Ring(cluster, control.exchange, control.patience)
            findings = [*_clocks(cluster, reports, uncertain), *_alike(cluster, reports), _all_reduce(ring, cluster)]
            control.gather(b"", "done")
            control.say_goodbye()
        finally:
            control.close()
    except (TfdistError, RingError, ValueError, KeyError, TypeError) as error:
        return [mine], [wrong("workers", f"{error}", "see the lines of the other workers, and docs/clusters.md.")]
    return reports, findings


def _clocks(cluster: Cluster, reports: Sequence[WorkerReport], uncertain: float) -> list[Finding]:
    """Compares the clocks. uncertain: seconds that the exchange itself took."""
    off = {other.rank: other.clock - reports[0].clock for other in reports}
    late = [rank for rank, seconds in off.items() if abs(seconds) > _MOST_SECONDS_APART + uncertain]
    if not late:
        return [fine("clocks", f"at most {max(map(abs, off.values())):.1f} s apart")]
    return [
        wrong(
            "clocks",
            f"the clock of {cluster.name(rank)} is {abs(off[rank]):.0f} s {'ahead of' if off[rank] > 0 else 'behind'}"
            " the chief's.",
            "synchronize the clocks with chrony or systemd-timesyncd (timedatectl).",
        )
        for rank in late
    ]


def _alike(cluster: Cluster, reports: Sequence[WorkerReport]) -> list[Finding]:
    findings = []
    versions = {other.versions for other in reports}
    if len(versions) > 1:
        words = "; ".join(f"rank {other.rank} {other.versions}" for other in reports)
        findings.append(wrong("versions", f"they differ: {words}.", "give all workers one image or environment."))
    with_gpus = [other.rank for other in reports if other.gpus]
    if 0 < len(with_gpus) < len(reports):
        without = ", ".join(cluster.name(other.rank) for other in reports if not other.gpus)
        findings.append(
            wrong(
                "GPUs",
                f"{without} has none, but the others have: all would wait for the CPU.",
                "ask for GPUs on every worker, or hide all by CUDA_VISIBLE_DEVICES=-1.",
            )
        )
    elif len({other.gpus for other in reports}) > 1:
        counts = ", ".join(f"rank {other.rank} has {other.gpus}" for other in reports)
        findings.append(warning("GPUs", f"{counts}: the workers differ.", "give every worker the same number of GPUs."))
    return findings


def _all_reduce(ring: Any, cluster: Cluster) -> Finding:
    import numpy as np

    expected = cluster.size * (cluster.size + 1) / 2
    seconds = []
    for number in range(3):
        array = np.full(_NUMBERS, cluster.rank + 1, np.float32)
        begun = time.monotonic()
        ring.all_reduce(array, bucket=number)
        seconds.append(time.monotonic() - begun)
        if not (array == expected).all():
            return wrong(
                "all-reduce",
                f"a sum came out as {float(array.min())} to {float(array.max())} and not {expected}.",
                "look for a faulty network card or memory: this should not happen.",
            )
    rate = 4 * _NUMBERS * 2 * (cluster.size - 1) / cluster.size / max(min(seconds), 1e-9)
    return fine(
        "all-reduce", f"of {4 * _NUMBERS / 2**20:.0f} MiB by TCP: {1e3 * min(seconds):.0f} ms, {rate / 1e9:.2f} GB/s"
    )
