#!/usr/bin/env bash
# Horovod for --strategy=horovod: built from its released source for the TensorFlow that is installed, and proved.
#
#   bash scripts/install_horovod.sh            into the active virtual environment, or else the one of environment.sh
#   bash scripts/install_horovod.sh --gpu      with NCCL and CUDA; see below
#   bash scripts/install_horovod.sh --force    build, install and prove again
#
# The first call takes about three minutes on two cores. The wheel is kept in HOROVOD_WHEEL_DIR (default
# ~/.cache/tfdist), under a name that holds the versions of Horovod, TensorFlow and Python: a wheel works with the very
# TensorFlow that it was built for only. Calls after the first only compare versions. One word of the source is mended
# (see build).
#
#   HOROVOD_PYTHON      the Python to install for, instead of that of the virtual environment
#   HOROVOD_WHEEL_DIR   where wheels are kept
#
# Needs cmake (3.13 or later; taken from pip if the machine has none), make, g++ and, with --gpu, CUDA's nvcc and
# headers (CUDA_HOME, default /usr/local/cuda) and NCCL (HOROVOD_NCCL_HOME if it is not beside CUDA).
#
# --gpu sets HOROVOD_GPU_OPERATIONS=NCCL and leaves out xla_mpi_ops.cc, whose headers TensorFlow no longer ships (it
# serves collectives inside XLA, which tfdist does not use). It has NOT been tried: no machine with GPUs and TensorFlow
# was at hand. The proof at the end runs on GPUs then, and says whether it works.
set -euo pipefail
version=0.28.1
gpu= force=
for argument in "$@"; do
  case $argument in
    --gpu) gpu=-nccl ;;
    --force) force=yes ;;
    *) echo "install_horovod.sh: unknown argument $argument: use --gpu, --force or nothing." >&2; exit 2 ;;
  esac
done

if [ -n "${HOROVOD_PYTHON:-}" ]; then
  python=$HOROVOD_PYTHON
elif [ -n "${VIRTUAL_ENV:-}" ]; then
  python=$VIRTUAL_ENV/bin/python
else
  source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
  python=$(command -v python)
fi

# From the installed files alone: importing TensorFlow would take seconds. Two lines: the key, and what is installed.
mapfile -t state < <("$python" - "$version" "$gpu" <<'PYTHON'
import importlib.util, pathlib, platform, sys
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
tensorflow = version("tensorflow") or version("tensorflow-cpu")
print(f"horovod-{sys.argv[1]}{sys.argv[2]}-tensorflow-{tensorflow}-{sys.implementation.cache_tag}-{platform.machine()}" if tensorflow else "")
spec = importlib.util.find_spec("horovod")
folder = pathlib.Path(spec.origin).parent if spec and spec.origin else None
proved = folder / "proved-by-tfdist" if folder else None
print(proved.read_text() if proved and proved.exists() and list(folder.glob("tensorflow/mpi_lib*.so")) else "")
print(folder or "")
PYTHON
)
key=${state[0]:-}
if [ -z "$key" ]; then
  echo "install_horovod.sh: TensorFlow is not installed for $python: install requirements.txt first, or set HOROVOD_PYTHON." >&2
  exit 10
fi
if [ -z "$force" ] && [ "${state[1]:-}" = "$key" ]; then
  echo "$key is installed."
  exit 0
fi

export PATH="$(dirname "$python"):$PATH"  # cmake and horovodrun of the virtual environment
cache=${HOROVOD_WHEEL_DIR:-$HOME/.cache/tfdist}/$key
mkdir -p "$cache"
exec 9>"$cache/lock" && flock 9  # two calls at once build one wheel
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

build() {
  local missing=() nvcc
  command -v g++ >/dev/null || missing+=("g++ (apt-get install g++, or dnf install gcc-c++)")
  command -v make >/dev/null || missing+=("make (apt-get install make)")
  nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
  [ -z "$gpu" ] || [ -x "$nvcc" ] || missing+=("nvcc and the CUDA headers (the CUDA toolkit; set CUDA_HOME if it is not in /usr/local/cuda)")
  if ((${#missing[@]})); then
    printf 'install_horovod.sh: %s is missing.\n' "${missing[@]}" >&2
    exit 10
  fi
  "$python" -m pip install --quiet wheel setuptools packaging cloudpickle psutil pyyaml
  command -v cmake >/dev/null || "$python" -m pip install --quiet "cmake>=3.13"
  "$python" -m pip download --quiet --no-deps --no-build-isolation --no-binary horovod --dest "$work" "horovod==$version"
  tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
  # With Gloo the list of ranks stays empty (it is reserved but never sized), so that the stall inspector, which walks it,
  # finds nobody missing: a rank that is stuck in Python would be waited for without end.
  sed -i 's/global_ranks_\.reserve(size_)/global_ranks_.resize(size_)/' "$work/horovod-$version/horovod/common/gloo/gloo_controller.cc"
  grep -q 'global_ranks_\.resize(size_)' "$work/horovod-$version/horovod/common/gloo/gloo_controller.cc"

  export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1
  export CMAKE_POLICY_VERSION_MINIMUM=3.5  # its bundled libraries ask for less, which cmake 4 refuses
  export LDFLAGS=-Wl,--strip-debug MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}"
  if [ -n "$gpu" ]; then
    export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}"
    sed -i '/xla_mpi_ops\.cc/d' "$work/horovod-$version/horovod/tensorflow/CMakeLists.txt"
  else
    # Headers that TensorFlow no longer ships; Horovod includes them always, and uses them in its GPU code only.
    local header
    for header in tf2xla/xla_op_kernel.h tf2xla/xla_op_registry.h xla/client/xla_builder.h xla/service/custom_call_target_registry.h xla/shape.h; do
      mkdir -p "$(dirname "$work/empty/tensorflow/compiler/$header")"
      touch "$work/empty/tensorflow/compiler/$header"
    done
    export CPATH="$work/empty${CPATH:+:$CPATH}"
  fi
  echo "Building $key (about three minutes on two cores; log: $cache/build.log) ..."
  if ! "$python" -m pip wheel --no-build-isolation --no-deps --wheel-dir "$work/wheel" --verbose "$work/horovod-$version" >"$cache/build.log" 2>&1; then
    grep -nE 'error|Error' "$cache/build.log" | head -n 20 >&2 || true
    echo "install_horovod.sh: the build failed; $cache/build.log has all of it." >&2
    exit 1
  fi
  mv "$work"/wheel/horovod-*.whl "$cache/"
}

prove() {
  # Two processes start from different weights and see different data; a broadcast and reduced gradients must leave
  # both with the same bits, and with the weights that one process computes from all of the data.
  cat >"$work/proof.py" <<'PYTHON'
import sys, zlib
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()
rank, size = hvd.rank(), hvd.size()
assert size == 2, f"{size} processes instead of 2"
if tf.config.list_physical_devices("GPU"):
    tf.config.set_visible_devices(tf.config.list_physical_devices("GPU")[hvd.local_rank()], "GPU")
data = np.random.default_rng(0).normal(size=(2, 64, 8)).astype("float32")
weights = tf.Variable(np.random.default_rng(rank).normal(size=(8, 3)).astype("float32"))
started = hvd.allgather(tf.constant([zlib.crc32(weights.numpy().tobytes())], tf.int64)).numpy()
hvd.broadcast_variables([weights], root_rank=0)

@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.tanh(tf.constant(data[rank]) @ weights) - 0.5))
    weights.assign_sub(0.1 * hvd.grouped_allreduce([tape.gradient(loss, weights)], op=hvd.Sum)[0] / 2)

for _ in range(50):
    step()
digests = hvd.allgather(tf.constant([zlib.crc32(weights.numpy().tobytes())], tf.int64)).numpy()
assert started[0] != started[1], "the processes did not start apart"
assert digests[0] == digests[1], f"weights differ: {digests}"
alone = tf.Variable(np.random.default_rng(0).normal(size=(8, 3)).astype("float32"))
for _ in range(50):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.tanh(tf.constant(data.reshape(-1, 8)) @ alone) - 0.5))
    alone.assign_sub(0.1 * tape.gradient(loss, alone))
difference = float(np.abs(alone.numpy() - weights.numpy()).max())
assert difference < 1e-5, f"weights are {difference} from those of one process"
print(f"proof: rank {rank} of {size}, weight digest {digests[rank]:08x}, {difference:.1e} from one process", flush=True)
PYTHON
  local visible=()
  [ -n "$gpu" ] || visible=(CUDA_VISIBLE_DEVICES=)
  if ! env "${visible[@]}" TF_CPP_MIN_LOG_LEVEL=3 timeout 300 horovodrun -np 2 --gloo "$python" "$work/proof.py" >"$cache/proof.log" 2>&1 ||
      [ "$(grep -c 'proof: rank' "$cache/proof.log")" != 2 ]; then
    tail -n 30 "$cache/proof.log" >&2
    echo "install_horovod.sh: two processes did not end with the same weights; $cache/proof.log has all of it." >&2
    exit 1
  fi
  grep -ho 'proof: rank.*' "$cache/proof.log"
}

[ -z "$force" ] || rm -f "$cache"/horovod-*.whl
compgen -G "$cache/horovod-*.whl" >/dev/null || build
"$python" -m pip install --quiet cloudpickle psutil pyyaml packaging
"$python" -m pip install --quiet --no-deps --force-reinstall "$cache"/horovod-*.whl
prove
printf '%s' "$key" >"$("$python" -c 'import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec("horovod").origin).parent)')/proved-by-tfdist"
echo "$key is installed and proved."
