#!/usr/bin/env bash
# The main job, from nothing: installs into a virtual environment, then trains a small convolutional network on
# scikit-learn's digits with two workers. About a minute after the installation.
#
#   bash scripts/quickstart.sh [train flags]     for example --epochs=5
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
run_dir=${TFDIST_RUN_DIR:-runs/quickstart-$(date +%Y%m%d-%H%M%S)}
python -m tfdist.launch --workers=2 -- --flagfile=flags/digits_cnn.flags --run_dir="$run_dir" "$@"
