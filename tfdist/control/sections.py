"""The sections of a run: what a worker is doing. The watchdog limits them, beacons and observers tell them."""

from __future__ import annotations

START_UP = "start-up"  # until all is put together and restored
RESTORE = "restore"
FIRST_STEP = "first step"  # the first call of the training function, which traces and compiles it
STEP = "step"  # each further call
BETWEEN_STEPS = "between steps"
EVALUATION = "evaluation"
SAVE = "save"  # training stands still for a snapshot or a backup; at the end of a run also for its results
STOPPING = "stopping"  # from a request to stop on, beside the others

STEPS = (FIRST_STEP, STEP)
