#!/usr/bin/env bash
# Two nodes of a Slurm cluster: writes the batch script, and submits it where there is sbatch. The run folder must be on
# a file system that all nodes see. A job that meets its time limit saves and goes back to the queue.
#
#   bash examples/slurm.sh
#
# Expected: runs/slurm/job.sbatch, and "Submitted batch job N".
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
mkdir -p runs/slurm
python -m tfdist.jobs slurm --nodes=2 --per_node=1 --time=01:00:00 --setup="source $PWD/scripts/environment.sh" \
  --write=runs/slurm/job.sbatch -- --flagfile=flags/digits_cnn.flags --run_dir=runs/slurm "$@"
if command -v sbatch >/dev/null; then
  sbatch runs/slurm/job.sbatch
else
  echo "There is no sbatch on this machine: look at runs/slurm/job.sbatch."
fi
