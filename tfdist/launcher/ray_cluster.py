"""Room on a Ray cluster: how many workers fit now, with resources reserved for them in placement groups.

The least number of workers is one placement group: all of them or none. Every further worker has its own placement
group, which Ray fills as soon as it can (and for which its autoscaler, if there is one, adds nodes). So a job starts
with the workers that fit, and learns from groups that have been filled meanwhile that there is room for more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from tfdist.control.amounts_text import counted
from tfdist.control.exit_codes import StartupError, UnsupportedError
from tfdist.control.terminal import say

_ASK_EVERY_SECONDS = 1.0
_REPORT_SECONDS = 10.0
_SETTLE_SECONDS = 5.0  # without a change in the placed workers, before their number is taken as final


def connect() -> None:
    """Connects to the Ray cluster of this machine, or to that of RAY_ADDRESS.

    Raises UnsupportedError (no Ray) or StartupError (no cluster).
    """
    try:
        import ray
    except ImportError:
        raise UnsupportedError('--on=ray needs Ray, which is not installed: pip install "ray>=2.40".') from None
    try:
        # The launcher relays the workers' output, prefixed with their names.
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:  # RuntimeError: of another version
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise StartupError(
            f"--on=ray found no Ray cluster that can be joined from here ({said.rstrip('.')}): run the launcher on one"
            " of its machines (`ray start --head` makes one), or set RAY_ADDRESS."
        ) from None


class RayPlacements:
    """A WorkerSupply that also says where workers run: `places` has a Ray scheduling strategy for each worker.

    Args:
      most, least: number of workers; `least` 0: always `most`.
      cpus, gpus: of each worker.
      timeout: seconds to wait for room for the least number.
    """

    def __init__(self, most: int, least: int, cpus: int, gpus: int, timeout: float):
        self.most, self.least, self.timeout = most, least or most, timeout
        self.bundle = {"CPU": float(cpus), **({"GPU": float(gpus)} if gpus else {})}
        self.count = most
        self.places: list = []
        self._groups: list = []  # the least number together, then one for each further worker
        self._asked_at = self._changed_at = 0.0
        self._placed_count = 0
        self._stopped = False

    def ask(self) -> int:
        """Releases the places of the previous job, requests all again, and waits for them.

        Raises StartupError after `timeout` seconds without room for the least number.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.close()
        self._request(self.least)
        if not self._wait(lambda: self._placed() > 0, self.timeout):
            lacking = self._lacking()
            self.close()
            raise StartupError(lacking)
        for _ in range(self.most - self.least):
            self._request(1)
        self._placed_count, self._changed_at = self.least, time.monotonic()
        self._wait(
            lambda: self._look() == self.most or time.monotonic() - self._changed_at > _SETTLE_SECONDS, float("inf")
        )
        placed = [group for group in self._groups if _is_placed(group)]
        self.places = [
            PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            for group in placed
            for index in range(group.bundle_count)
        ]
        self.count = self._placed_count = len(self.places)
        if self.count < self.most:
            say(f"Ray has room for {self.count} of {self.most} workers: {describe_cluster()}.")
        return self.count

    def wanted(self) -> int:
        """Returns the number of workers wanted now: more than before once there has been room for them for some
        seconds. A lost place is no reason to stop: its worker will fail, or has not been started."""
        if self.count < self.most and time.monotonic() - self._asked_at > _ASK_EVERY_SECONDS:
            placed = self._look()
            if placed > self.count and time.monotonic() - self._changed_at > _SETTLE_SECONDS:
                self.count = placed
        return self.count

    def failed(self, rank: int | None, progress: bool) -> None:
        """Does nothing: Ray knows where there is room."""

    def stop(self) -> None:
        """Makes a waiting `ask` return; for signal handlers."""
        self._stopped = True

    def close(self) -> None:
        """Releases all places."""
        from ray.util import remove_placement_group

        for group in self._groups:
            remove_placement_group(group)
        self._groups, self.places = [], []

    def _request(self, bundles: int) -> None:
        from ray.util import placement_group

        self._groups.append(placement_group([dict(self.bundle)] * bundles, strategy="PACK"))

    def _placed(self) -> int:
        """Returns the number of workers for which there is a place."""
        return sum(group.bundle_count for group in self._groups if _is_placed(group))

    def _look(self) -> int:
        placed, self._asked_at = self._placed(), time.monotonic()
        if placed != self._placed_count:
            self._placed_count, self._changed_at = placed, self._asked_at
        return placed

    def _wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        start = reported = time.monotonic()
        while not condition() and not self._stopped:
            now = time.monotonic()
            if now - start > timeout:
                return False
            if now - reported > _REPORT_SECONDS:
                reported = now
                say(
                    f"waiting for Ray to place {self.least} workers of {_amount(self.bundle)}, {now - start:.0f} s of"
                    f" {timeout:g} s: {describe_cluster()}."
                )
            time.sleep(0.2)
        return True

    def _lacking(self) -> str:
        fewer = "--min_workers" if self.least < self.most else "--workers"
        more = ", --gpus_per_worker" if "GPU" in self.bundle else ""
        return (
            f"Ray found no room for {self.least} workers of {_amount(self.bundle)} each within"
            f" --placement_timeout={self.timeout:g} s, since {describe_cluster()}: add nodes, or lower {fewer}{more} or"
            " --cpus_per_worker."
        )


def _is_placed(group) -> bool:
    from ray.util import placement_group_table

    return placement_group_table(group).get("state") == "CREATED"


def describe_cluster() -> str:
    """Describes the cluster: "the cluster has 3 nodes (2 CPUs; 2 CPUs, 1 GPU; 1 CPU), with 1 CPU free"."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    free = ray.available_resources()
    amounts = "; ".join(map(_amount, nodes))
    return f"the cluster has {counted(len(nodes), 'node')} ({amounts}), with {_amount(free)} free"


def _amount(resources: Mapping[str, float]) -> str:
    kinds = [
        f"{resources[kind]:g} {kind}{'s' if resources[kind] != 1 else ''}"
        for kind in ("CPU", "GPU")
        if resources.get(kind)
    ]
    return ", ".join(kinds) or "nothing"
