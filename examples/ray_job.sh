#!/usr/bin/env bash
# Two workers where a Ray cluster has room for them. To be started on one of its machines, or with RAY_ADDRESS;
# `pip install "ray>=2.40"` and `ray start --head` make a cluster of this machine alone.
#
#   bash examples/ray_job.sh
#
# Expected, in about a minute: evaluation accuracy of at least 0.97. When a node is lost, its worker is placed anew.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
python -m tfdist.launch --on=ray --workers=2 --min_workers=1 -- --flagfile=flags/digits_cnn.flags \
  --run_dir=runs/ray "$@"
