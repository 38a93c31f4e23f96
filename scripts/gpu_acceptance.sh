#!/usr/bin/env bash
# Is tfdist right and fast on this machine's GPUs? From nothing: installs, then runs every stage; one page and a JSON.
#
#   bash scripts/gpu_acceptance.sh                       on a machine with one NVIDIA GPU or several, 30 minutes
#   bash scripts/gpu_acceptance.sh --wheels=FOLDER       the same without a network: installs from these wheels alone
#   bash scripts/gpu_acceptance.sh --rehearse            all of it on the CPU at a small size, in minutes
#   bash scripts/gpu_acceptance.sh --only=doctor,parity  some stages
#
# Further arguments go to scripts/acceptance/run.py; --help lists them.
set -euo pipefail
arguments=()
for argument in "$@"; do
  case $argument in
    --wheels=*) export PIP_NO_INDEX=1 PIP_FIND_LINKS="${argument#--wheels=}" ;;
    *) arguments+=("$argument") ;;
  esac
done
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
python -c "import pytest" 2>/dev/null || python -m pip install --quiet --disable-pip-version-check "pytest>=8" # by lookups
exec python scripts/acceptance/run.py "${arguments[@]}"
