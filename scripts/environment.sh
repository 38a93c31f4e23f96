# Sourced by the other scripts: makes the virtual environment if it is missing or out of date, and activates it.
#
#   TFDIST_VENV    where it is (default: .venv in the repository)
#   TFDIST_PYTHON  the Python to make it with (default: the newest of 3.13, 3.12, 3.11 that is there)
#
# Usage: source scripts/environment.sh [EXTRA]    EXTRA: an extra of pyproject.toml, for example test

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${TFDIST_VENV:-$repository/.venv}
extra=${1:-}
case $extra in -*) extra= ;; esac # a flag of the script that sources this without an argument

find_python() {
  for candidate in ${TFDIST_PYTHON:-python3.13 python3.12 python3.11 python3}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "tfdist needs Python 3.11, 3.12 or 3.13 with its venv module; none was found: install one, or set TFDIST_PYTHON to it." >&2
  return 10
}

python=$(find_python) || exit 10
packages=(-r "$repository/requirements.txt")
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
  packages+=("tensorflow[and-cuda]~=2.21.0" "nvidia-cudnn-cu12>=9.24") # older ones: docs/gpus.md, known traps
fi
wanted=$( (cat "$repository/requirements.txt" "$repository/pyproject.toml"; echo "${packages[*]} $("$python" -V)") | cksum )
if [ "$(cat "$venv/.tfdist-installed-$extra" 2>/dev/null)" != "$wanted" ]; then
  echo "Installing into $venv (once; a few minutes on a fresh machine) ..."
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  if [ -n "$extra" ]; then
    mapfile -t optional < <("$venv/bin/python" -c "
import sys, tomllib
print(*tomllib.load(open(sys.argv[1], 'rb'))['project']['optional-dependencies'][sys.argv[2]], sep='\n')" "$repository/pyproject.toml" "$extra")
    packages+=("${optional[@]}")
  fi
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}" || exit 1
  echo "$wanted" >"$venv/.tfdist-installed-$extra"
fi
. "$venv/bin/activate"
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"
cd "$repository" || exit 1
