#!/usr/bin/env bash
# The tests, from nothing: installs into a virtual environment, then runs pytest.
#
#   bash scripts/test.sh                 everything (13 to 33 minutes on two cores, by machine)
#   bash scripts/test.sh -m "not slow"   the fast part (2 to 3)
#   bash scripts/test.sh -m thorough     the rest: more meshes, engines and models (another half an hour)
#   bash scripts/test.sh tests/unit/data further arguments go to pytest
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" test
# Tests start several TensorFlow processes on few cores: without this their threads fight. No GPU: results are
# compared bit for bit.
export OMP_NUM_THREADS=1 TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=1 CUDA_VISIBLE_DEVICES= TF_CPP_MIN_LOG_LEVEL=2
# Else each process compiles tfdist anew, and each of pytest's all tests (5 s of a core each).
unset PYTHONDONTWRITEBYTECODE

# Beside the tests; what they find is said at the end.
checks=$(mktemp)
trap 'rm -f "$checks"' EXIT
(
  status=0
  python -m ruff check tfdist tests scripts examples docs || status=1
  python -m ruff format --check --quiet tfdist tests scripts examples docs/*.py || status=1
  python -m basedpyright || status=1
  exit "$status"
) >"$checks" 2>&1 &
checking=$!
# Three at a time on two cores (four take no less time, and more of the cores). TFDIST_TEST_PROCESSES=0 runs them one by
# one. In the order of folders: files of few long tests come first, and in the end nobody waits long for the others. A
# process that dies is the end: pytest-xdist would start another, and wait for ever (seen with 3.8 and loadfile).
failed=0
python -m pytest -n "${TFDIST_TEST_PROCESSES:-3}" --dist loadfile --no-loadscope-reorder --max-worker-restart=0 "$@" || failed=$?
checked=0
wait "$checking" || checked=$?
cat "$checks"
if [ "$checked" -ne 0 ]; then
  echo "ruff or basedpyright found something: see above." >&2
  [ "$failed" -ne 0 ] || failed=1
fi
exit "$failed"
