"""The time that collective calls take, by the alpha-beta model: a message of m bytes takes alpha + m / beta.

Terms: n members; S, bytes of the whole vector; alpha, latency in seconds; beta, bytes per second in one direction.

    ring                2 (n-1) alpha       + 2 (n-1)/n S / beta    Patarasuk and Yuan 2009; in NCCL and our sockets
    tree                2 ceil(log2 n) (alpha + S / beta)           reduce to the root, broadcast back
    halving_doubling    2 log2 n alpha      + 2 (n-1)/n S / beta    Rabenseifner; Thakur, Rabenseifner and Gropp 2005
    hierarchical        reduce-scatter in the node, all-reduce of S / g between nodes, all-gather in the node
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfdist.planner.hardware import Hardware
from tfdist.runtime.mesh import Mesh


@dataclass(frozen=True)
class Link:
    """alpha in seconds, beta in bytes per second."""

    alpha: float
    beta: float


def passed_on(n: int) -> float:
    """Returns the share of a vector that each member sends in a reduce-scatter, an all-gather or an all-to-all: all but
    its own part. An all-reduce is a reduce-scatter followed by an all-gather.
    """
    return (n - 1) / n


def ring_all_reduce(n: int, size: float, link: Link) -> float:
    """The seconds of a ring all-reduce."""
    return 2 * (n - 1) * link.alpha + 2 * passed_on(n) * size / link.beta


def tree_all_reduce(n: int, size: float, link: Link) -> float:
    """The seconds of a tree all-reduce, without pipelining of the message."""
    return 2 * math.ceil(math.log2(n)) * (link.alpha + size / link.beta)


def halving_doubling_all_reduce(n: int, size: float, link: Link) -> float:
    """The seconds of halving-doubling. Members beyond a power of two first send their vector to a neighbor, and receive
    the sum at the end."""
    power = 2 ** int(math.log2(n))
    extra = 2 * (link.alpha + size / link.beta) if power != n else 0.0
    return extra + 2 * math.log2(power) * link.alpha + 2 * passed_on(power) * size / link.beta


FLAT: dict[str, Callable[[int, float, Link], float]] = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
}
ALGORITHMS = (*FLAT, "hierarchical")


def ring_pass(n: int, size: float, link: Link) -> float:
    """Seconds of a reduce-scatter, or of an all-gather, of S bytes in total: half a ring all-reduce."""
    return (n - 1) * link.alpha + passed_on(n) * size / link.beta


def all_to_all(n: int, size: float, link: Link) -> float:
    """The seconds of an all-to-all in which each member holds S bytes and keeps 1/n of them."""
    return ring_pass(n, size, link)


def hierarchical_all_reduce(nodes: int, local: int, size: float, inside: Link, between: Link) -> float:
    """The seconds with `local` members in each of `nodes` nodes. between: one member's share of a node's network."""
    within = 2 * ring_pass(local, size, inside) if local > 1 else 0.0
    return within + (ring_all_reduce(nodes, size / local, between) if nodes > 1 else 0.0)


@dataclass(frozen=True)
class Group:
    """Devices that communicate: `size` in total, `local` of them in one node. `rivals` such groups share the network of
    a node.
    """

    size: int
    local: int
    rivals: int = 1

    @classmethod
    def along(cls, mesh: Mesh, axes: Sequence[str], hardware: Hardware) -> Group:
        """Returns the group along axes of a mesh in which each rank has a device and nodes are filled in order. If such
        groups differ, returns the slowest one, because all wait for it."""
        size, stride, per_node = mesh.degree(*axes), mesh.stride(*axes), hardware.per_node
        span = size * stride  # devices from the first to the last of `stride` interleaved groups
        if size > 1 and span < per_node < mesh.size and per_node % span:  # some groups lie in two nodes
            return cls(size, -(-size // 2), stride)
        return cls.of(size, stride, hardware)

    @classmethod
    def of(cls, size: int, stride: int, hardware: Hardware) -> Group:
        """Returns a group of `size` members, `stride` devices apart, starting at the first device of a node."""
        local = max(1, min(size, hardware.per_node // stride)) if stride < hardware.per_node else 1
        return cls(size, local, max(1, min(hardware.per_node, size * stride) // local))

    @property
    def nodes(self) -> int:
        return -(-self.size // self.local)

    def inside(self, hardware: Hardware) -> Link:
        return Link(hardware.link_us * 1e-6, hardware.link_gbs * 1e9)

    def flat(self, hardware: Hardware) -> Link:
        """The slowest link in a ring or tree over all members."""
        if self.nodes == 1:
            return self.inside(hardware)
        share = hardware.node_gbs / self.rivals
        return Link(hardware.network_us * 1e-6, (min(hardware.link_gbs, share) if self.local > 1 else share) * 1e9)

    def between(self, hardware: Hardware) -> Link:
        """The link between nodes that one member has when all use the node's network."""
        return Link(hardware.network_us * 1e-6, hardware.node_gbs / (self.rivals * self.local) * 1e9)


def all_reduce_seconds(group: Group, size: float, hardware: Hardware) -> dict[str, float]:
    """Seconds of an all-reduce of `size` bytes by each algorithm; all are 0 for a group of one."""
    if group.size == 1:
        return dict.fromkeys(ALGORITHMS, 0.0)
    times = {name: seconds(group.size, size, group.flat(hardware)) for name, seconds in FLAT.items()}
    times["hierarchical"] = hierarchical_all_reduce(
        group.nodes, group.local, size, group.inside(hardware), group.between(hardware)
    )
    return times


def pass_seconds(group: Group, size: float, hardware: Hardware) -> float:
    """Seconds of a reduce-scatter or an all-gather: a flat ring, or two levels if that is faster."""
    if group.size == 1:
        return 0.0
    flat = ring_pass(group.size, size, group.flat(hardware))
    if group.nodes == 1 or group.local == 1:
        return flat
    two = ring_pass(group.local, size, group.inside(hardware)) + ring_pass(
        group.nodes, size / group.local, group.between(hardware)
    )
    return min(flat, two)
