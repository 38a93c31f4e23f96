#!/usr/bin/env bash
# Parameter servers: two workers send gradients, each when it has one, to the server that holds the weights.
#
#   bash examples/parameter_server.sh
#
# Expected, in about a minute on two cores: evaluation accuracy of at least 0.95, and the staleness of gradients in the
# summary (about 1: with two workers, most were computed on weights one update old).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
python -m tfdist.launch --workers=2 --ps=1 -- --strategy=parameter_server --ps_mode=async --source=digits --model=cnn \
  --global_batch=32 --learning_rate=1e-3 --steps=900 --run_dir=runs/parameter_server "$@"
