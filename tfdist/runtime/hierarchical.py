"""All-reduce in two levels: within a host, where links are fast, then across hosts, where they are shared and slow.

    reduce-scatter within the host: each of its m members gets 1 / m of the host's sum
    all-reduce across hosts, among the members that have the same part
    all-gather within the host

For S bytes and h hosts each member sends about 2 S / m * (h - 1) / h across hosts; a flat ring over all members may
send 2 S through the link of a host, and its 2 (m h - 1) hops each wait for the slowest. (The scheme is that of Jia et
al. 2018, arXiv:1807.11205, with a reduce-scatter in place of a reduction to one leader.) If all members are on one
host, or each member has its own host, only a flat all-reduce remains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.control.exit_codes import ConfigError
from tfdist.runtime.collectives import Group
from tfdist.runtime.host import known_dims


def check_hosts(groups: Sequence[Sequence[int]], alike: Sequence[Sequence[int]], hosts: Sequence[str]) -> None:
    """Raises ConfigError if one of the groups has different numbers of members on its hosts (all ranks check the groups
    of all, so that none waits for others), or if those that must add up in the same order are spread over hosts in
    different ways.

    groups, alike: the ranks of each group. hosts: the host of every rank of the cluster.
    """
    for ranks in groups:
        by_host = _by_host(ranks, hosts)
        if len({len(members) for members in by_host.values()}) > 1:
            counts = ", ".join(f"{host} has {len(members)}" for host, members in by_host.items())
            raise ConfigError(
                "--all_reduce=hierarchical needs the same number of workers of a group on each host, but of ranks"
                f" {', '.join(map(str, ranks))} {counts}: start the same number on each, or use --all_reduce=flat."
            )
    for ranks in alike:
        if _brackets(ranks, hosts) != _brackets(alike[0], hosts):
            one, other = (", ".join(f"{rank} on {hosts[rank]}" for rank in each) for each in (alike[0], ranks))
            raise ConfigError(
                f"--all_reduce=hierarchical: the ranks {one} and the ranks {other} hold copies of the same weights, and"
                " would add up their gradients in different orders: spread both over hosts in the same way, or use"
                " --all_reduce=flat."
            )


def _brackets(ranks: Sequence[int], hosts: Sequence[str]) -> list[list[int]]:
    """The places in the group that are added up first, host by host; [] if all are added up at once."""
    by_host = _by_host(ranks, hosts)
    if len(by_host) in (1, len(ranks)):
        return []
    return [[ranks.index(member) for member in members] for members in by_host.values()]


def _by_host(ranks: Sequence[int], hosts: Sequence[str]) -> dict[str, list[int]]:
    """host -> those of the ranks that are on it."""
    found: dict[str, list[int]] = {}
    for member in ranks:
        found.setdefault(hosts[member], []).append(member)
    return found


class HierarchicalGroup:
    """A two-level all-reduce among some ranks, equally many on each host. `group_of`: ranks, which include this worker
    -> their Group.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, hosts: Sequence[str], group_of: Callable[[Sequence[int]], Group]
    ):
        by_host = _by_host(ranks, hosts)
        own_host = by_host[hosts[rank]]
        place = own_host.index(rank)
        # The members on this host, and those with this position on every host, both in the order of `ranks`.
        self.within, self.across = group_of(own_host), group_of([members[place] for members in by_host.values()])

    def all_reduce(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the sum over members, bitwise the same on all; it has a gradient. x: any static shape, dtypes as in
        Group.all_reduce.
        """
        if self.within.size == 1:
            return self.across.all_reduce(x)
        if self.across.size == 1:
            return self.within.all_reduce(x)
        size = math.prod(known_dims(x.shape))
        padding = -size % self.within.size
        flat = tf.pad(tf.reshape(x, [-1]), [[0, padding]])
        part = self.across.all_reduce(self.within.reduce_scatter(flat))
        return tf.reshape(self.within.all_gather(part)[:size], x.shape)
