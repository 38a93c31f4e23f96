"""Watches over one worker: watchdog, beacons, signals, injected faults; and names the cause when a run fails.

Everything here works with any runtime, and keeps working when TensorFlow's own connections hang.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

from tfdist.config import ClusterConfig, Config
from tfdist.control import faults, sections
from tfdist.control.beacons import ENDPOINT_BYTES, Beacons
from tfdist.control.cluster import Cluster
from tfdist.control.exit_codes import (
    FINAL,
    ExitCode,
    PeerFailedError,
    PeerLostError,
    TfdistError,
    before_end_process,
    error_line,
    say_last_words,
)
from tfdist.control.signals import SignalRequests
from tfdist.control.terminal import say
from tfdist.control.watchdog import Watchdog, all_stacks
from tfdist.runtime import preemption
from tfdist.runtime.base import Runtime
from tfdist.runtime.decisions import texts_of_all
from tfdist.runtime.errors import explain, explain_own_code

_START_UPS = 4  # start-up as a whole (runtime, data, model, restore) may take this many times --startup_timeout
_WORDS_SECONDS = 1.0  # how long a worker that lost a peer waits for that peer's reason
_VERDICT_SECONDS = 5.0  # after an error that all may share: how long a worker waits for those that have yet to see it


class HealthMonitor:
    """Watches this worker from its start to its end."""

    def __init__(self, config: Config, cluster: Cluster, requests: SignalRequests | None):
        self.cluster, self.options = cluster, config.cluster
        self.faults = faults.Faults.parse(os.environ.get(faults.VARIABLE, ""), max(cluster.rank, 0), config.run.folder)
        self.beacons: Beacons | None = None
        self._requests = requests  # of this process, which may have been in another group before
        self._explanations: list[Callable[[BaseException], BaseException | None]] = [
            lambda error: explain(error, cluster),
            explain_own_code,
        ]
        self.watchdog = Watchdog(section_limits(config.cluster), self._expired).start()

    def explain_with(self, explanation: Callable[[BaseException], BaseException | None]) -> None:
        """Adds `explanation`, to be asked first what an error means; it returns None if it does not know."""
        self._explanations.insert(0, explanation)

    def signals(self) -> SignalRequests:
        """Returns the signal requests of this process; takes over the signals if that was not done before.

        The grace period is counted from the first SIGTERM.
        """
        margin = min(2.0, self.options.grace_period / 4)  # time to report that the period was too short
        requests = self._requests = self._requests or take_signals(self.options)
        requests.on_stop = lambda: self.watchdog.stop_within(self.options.grace_period - margin)
        if requests.stop:
            requests.on_stop()
        return requests

    def all_saved(self) -> None:
        """Notes that training is over and all its files are on this machine: no request to stop can come too late.
        Uploads to an object store may still be under way; the next start sends them."""
        if self._requests:
            self._requests.all_saved = True
        self.watchdog.stop_in_any_time()

    def connect(self, runtime: Runtime) -> None:
        """Connects this worker's beacons with those of the others. A collective call."""

        def exchange(endpoint: str) -> list[str]:
            return texts_of_all(runtime, endpoint, ENDPOINT_BYTES)

        if len(self.cluster.peers) > 1:
            beacons = self.beacons = Beacons(self.cluster, self.watchdog, exchange, runtime.waiting_for)
            before_end_process(lambda sentence, code: beacons.announce(sentence, code=code))

    def failed(self, error: BaseException) -> BaseException:
        """Returns the error to end with after `error`: its cause as a sentence, if known. Tells the others."""
        sentence = next(filter(None, (look(error) for look in self._explanations)), None)
        found: BaseException = error if sentence is None else sentence
        lost, found_at = isinstance(found, PeerLostError), time.time()
        if self.beacons is None:
            return found
        code = found.exit_code if isinstance(found, TfdistError) else ExitCode.INTERNAL
        unexpected = sentence is None and not isinstance(found, TfdistError)
        said = f"{type(found).__name__}: {found}" if unexpected else str(found)
        self.beacons.announce(said, secondary=lost, code=code)
        if lost:
            return self._lost_peer(str(found), found_at, self.beacons)
        if code in FINAL:
            # Most such errors are verdicts on the result of a collective call (differing flags or weights). A worker
            # that left at once would break that call for those that are still receiving, and they would report a lost
            # peer.
            self.beacons.wait_for_errors(_VERDICT_SECONDS)
        return found

    def _lost_peer(self, sentence: str, found_at: float, beacons: Beacons) -> PeerLostError | PeerFailedError:
        """Makes the error about a lost peer, with what that peer or another worker has said about the cause. If no new
        start mends that, this worker ends with the same code, for engines that see only one of the workers' codes."""
        words = beacons.first_error(_WORDS_SECONDS)
        if words and not words.secondary:
            said = f"{self.cluster.name(words.rank)} failed: {words.error}"
            return PeerFailedError(said, ExitCode(words.code)) if words.code in FINAL else PeerLostError(said)
        if words and words.error_time < found_at:
            said = words.error.partition(" Look at")[0]
            sentence += f" Before that, {self.cluster.name(words.rank)} reported: {said}"
        if silent := beacons.silent():
            sentence += f" Silent: {'; '.join(map(beacons.describe, silent))}."
        return PeerLostError(sentence)

    def close(self) -> None:
        """Ends the watching."""
        self.watchdog.close()
        before_end_process(None)
        if self.beacons:
            self.beacons.close()

    def _expired(self, section: str, seconds: float) -> None:
        """Names the stuck section in this worker's log and to the others, and ends the process. Runs in the watchdog's
        thread."""
        ranks = self.beacons.culprits() if self.beacons else None
        if section == sections.STOPPING:
            sentence = (
                f"Not saved within --grace_period={self.options.grace_period:g} s of SIGTERM: the run resumes from the"
                " previous snapshot. Raise the platform's limit and the flag, or make calls shorter with"
                " --steps_per_loop."
            )
        else:
            sentence = (
                f'Section "{section}" took {seconds:.0f} s, more than {_LIMITS[section].flag} allows:'
                f" {self._blame(ranks)}"
            )
        words = error_line(sentence, ExitCode.HANG)
        if ranks in ([], None) or self.cluster.rank in ranks:  # the others only wait; their stacks would mislead
            words = f"tfdist: this worker's Python stacks:\n{all_stacks()}\n{words}"
        say_last_words(words)
        if self.beacons:
            self.beacons.announce(sentence, code=ExitCode.HANG)
            # The others' time is up as well: let them still see where this worker is.
            time.sleep(self.beacons.interval)
        os._exit(ExitCode.HANG)

    def _blame(self, ranks: list[int] | None) -> str:
        if ranks is None or self.beacons is None:
            return "the stack is above."
        if not ranks:
            return "no worker is behind the others; compare the stacks in their logs."
        return f"the others are waiting for {'; '.join(map(self.beacons.describe, ranks))}."


def take_signals(options: ClusterConfig) -> SignalRequests:
    """Takes over SIGTERM, SIGHUP and SIGUSR1, and awaits the platform's notice. Once per process, in the
    main thread.
    """
    requests = SignalRequests().install()

    def on_notice() -> None:
        say(
            f"--preemption_notice={options.preemption_notice}: this machine is about to be taken away; saving,"
            f" then ending with exit code {ExitCode.PREEMPTED.value}."
        )
        requests.stop = True

    preemption.watch(options.preemption_notice, on_notice)
    return requests


class _Limit(NamedTuple):
    """How long a section may take."""

    option: str  # of ClusterConfig: seconds; 0: no limit
    times: int = 1

    @property
    def flag(self) -> str:
        return f"--{self.option}" if self.times == 1 else f"{self.times} x --{self.option}"


_LIMITS = {
    sections.START_UP: _Limit("startup_timeout", times=_START_UPS),
    sections.RESTORE: _Limit("save_timeout"),
    sections.FIRST_STEP: _Limit("first_step_timeout"),
    sections.STEP: _Limit("step_timeout"),
    sections.BETWEEN_STEPS: _Limit("step_timeout"),
    sections.EVALUATION: _Limit("eval_timeout"),
    sections.SAVE: _Limit("save_timeout"),
}


def section_limits(options: ClusterConfig) -> dict[str, float]:
    """The seconds that each section of a run may take; 0: no limit."""
    return {section: limit.times * getattr(options, limit.option) for section, limit in _LIMITS.items()}
