#!/usr/bin/env bash
# A model that does not fit a device: workers each hold a share of parameters, gradients and optimizer state (ZeRO-3).
# First the planner, for 9.7 billion parameters on 8 GPUs of 80 GB; then a small model of the same kind is trained the
# same way on two workers of this machine.
#
#   bash examples/zero3.sh
#
# Expected, in about a minute on two cores: "ZeRO-3 ... the fastest that fits; 49.8 of 80 GB; ... without ZeRO it would
# need 182 GB"; then a loss that falls from 5.5 to below 3 in 60 steps.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
python -m tfdist.plan --devices=8 --hardware=h100 --mesh=data=8 --recompute=blocks -- --source=text \
  --sequence_length=1024 --model=transformer --model_args=layers=48,width=4096,heads=32 --precision=bfloat16 \
  --global_batch=64
python -m tfdist.launch --workers=2 -- --strategy=mesh --zero=3 --recompute=block --source=text --model=transformer \
  --model_args=size=tiny --global_batch=16 --steps=60 --learning_rate=3e-3 --run_dir=runs/zero3 "$@"
