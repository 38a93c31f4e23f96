"""Elastic training: continues in the same process while other workers come and go. Workers of `tfdist.launch --elastic`
run this.

  join a group             the launcher says who is in it, and which rank this process has (control/membership.py)
  train (session.run)      every worker keeps a copy of the state in its memory, at boundaries that are the same for all
  until the run ends, or the group does:
    - a worker is lost     the others get an error in the collective call that is under way; each goes back to its copy
    - a worker has failed  in a way that may pass (a read from a file server): it keeps its process and closes its
                           runtime, so that the others get that error, too
    - another is wanted    the launcher says so; the request travels in the step's own reduction, so that all leave
                           together at one boundary, where each makes a copy: no step is lost
  forget the session, keep the copy (in_memory_checkpoint.py), join the next group

The model, the step and the iterators are composed again in every group, since rank, plan and sizes are constants in the
traces of TensorFlow. The chief of the new group is the worker with the newest copy; all workers take over its state,
newcomers too. The data order is a function of the position, and the global batch does not change, so the new group sees
the batches that the old one would have seen.

Any runtime can be used whose start (runtime/factory.py) works again in the same process after an error.
"""

from __future__ import annotations

import gc
import os

import keras

from tfdist.config import Config
from tfdist.control.exit_codes import ExitCode, PeerLostError, StartupError
from tfdist.control.membership import Member
from tfdist.control.terminal import say
from tfdist.control.token import Secret
from tfdist.run import session
from tfdist.run.health import take_signals
from tfdist.run.in_memory_checkpoint import WorkerMemory

_MOST_IN_A_ROW = 5  # limit of groups that broke without a newer copy, although no other worker had died or failed


def run(config: Config, command: str, secret: Secret) -> ExitCode:
    """Trains in one group of workers after another. Returns how the last one ended; raises what session.run raises."""
    memory = WorkerMemory(Member(os.environ, secret), take_signals(config.cluster))
    lost, in_a_row, before = False, 0, -1
    while True:
        step = memory.checkpoint.step if memory.checkpoint else -1
        cluster = memory.member.join(step, lost)
        if cluster is None:
            return ExitCode.PREEMPTED if memory.signals.stop else ExitCode.OK
        memory.groups += 1
        try:
            return session.run(session.Start(config, cluster, command, memory))
        except session.GroupChange:
            lost = False
        except (PeerLostError, StartupError) as error:
            lost = True
            step = memory.checkpoint.step if memory.checkpoint else -1
            in_a_row = 0 if step > before else in_a_row + 1
            before = step
            if in_a_row >= _MOST_IN_A_ROW and not memory.member.broken:
                raise
            where = f"step {step}, which is in memory" if memory.checkpoint else "the newest snapshot"
            say(f"{error} Continuing from {where}, once there is a new group.")
        _forget()


def _forget() -> None:
    """Frees what the last group has left: models, traced functions.

    Also resets layer names, so that layers are named as in a new process.
    """
    keras.utils.clear_session()
    gc.unfreeze()  # the loop has frozen it
    gc.collect()
