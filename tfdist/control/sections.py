"""The sections of a run: what a worker is doing. The watchdog limits their time; beacons and observers report them."""

from __future__ import annotations

START_UP = "start-up"  # until everything is built and restored
RESTORE = "restore"
FIRST_STEP = "first step"  # the first call of the training function, which traces and compiles it
STEP = "step"  # each further call
BETWEEN_STEPS = "between steps"
EVALUATION = "evaluation"
SAVE = "save"  # training waits for a snapshot or a backup; at the end of a run also for its results
STOPPING = "stopping"  # begins with a request to stop, and runs in parallel with the other sections

STEPS = (FIRST_STEP, STEP)
