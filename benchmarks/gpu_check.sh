#!/usr/bin/env bash
# Check and measure Octavo on a GPU; print one table in under 8 minutes.
#
#   benchmarks/gpu_check.sh [--wheels FOLDER] [--out FILE] [--quick]
#
# Requirements: this repository, and a Python with torch for CUDA, Triton and transformers (set PYTHON;
# default: that of .venv if it exists, otherwise python3). The script builds Octavo from the source. This
# needs a C++ compiler and, in that Python, scikit-build-core, nanobind, cmake and ninja. With --wheels
# it installs Octavo from FOLDER instead, and other packages that the Python lacks; transformers requires
# all packages that Octavo needs here, except msgspec and pyzmq. The script installs into build/gpu_check,
# does not change the Python, and does not use the network.
#
# Build FOLDER on another machine of the same kind, with the same version of Python:
#
#   python -m pip wheel --no-deps -w FOLDER .
#   python -m pip wheel --no-deps -w FOLDER msgspec pyzmq
#
# Without --no-deps, pip would add torch and all of CUDA. If the versions of Python differ, replace the
# second command by `pip download --no-deps -d FOLDER --only-binary :all: --python-version 3.12
# msgspec pyzmq`, and omit the first: the script then builds Octavo on the GPU's machine.
#
# Exit status: 0 success, 1 a check failed, 3 no GPU, 4 a requirement is missing.
set -euo pipefail
folder=
arguments=()
while (($#)); do
  case $1 in
    --wheels) folder=$(realpath -m "$2"); shift 2 ;;
    --out) arguments+=(--out "$(realpath -m "$2")"); shift 2 ;;
    *) arguments+=("$1"); shift ;;
  esac
done
cd "$(dirname "$0")/.."
python=python3
[[ ! -x .venv/bin/python ]] || python=.venv/bin/python
python=${PYTHON:-$python}

missing() {
  echo "gpu_check: $1; see the head of benchmarks/gpu_check.sh. Nothing was checked." >&2
  exit 4
}

sees_gpu='
import ctypes, sys
try:
    import torch
    if torch.cuda.is_available():
        sys.exit(0)
except ImportError:
    pass
try:
    count, driver = ctypes.c_int(0), ctypes.CDLL("libcuda.so.1")
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
except OSError:
    failed = True
sys.exit(3 if failed or count.value == 0 else 4)'
status=0
"$python" -c "$sees_gpu" 2>/dev/null || status=$?
if ((status == 3)); then
  echo "gpu_check: no GPU: the NVIDIA driver shows none to this process; nothing was checked." >&2
  exit 3
fi
((status == 0)) || missing "there is a GPU, but $python has no torch that can use it"
target=build/gpu_check
rm -rf $target
mkdir -p $target
export PYTHONPATH=$PWD/$target${PYTHONPATH:+:$PYTHONPATH}
install=("$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps
  --root-user-action ignore --target $target)
shopt -s nullglob
wheels=(${folder:+"$folder"/*.whl})
if [[ -n $folder ]]; then
  ((${#wheels[@]})) || missing "there is no wheel in $folder"
  "${install[@]}" "${wheels[@]}" || missing "the wheels in $folder cannot be installed in $python"
fi
# -P: import the installed octavo, not this repository's folder.
where() { "$python" -P -c 'import octavo._native; print(octavo.__file__)' 2>/dev/null || true; }
if [[ ! -d $target/octavo && $(where) != $PWD/octavo/* ]]; then  # not an editable install of this folder
  "${install[@]}" --no-build-isolation . || missing "octavo cannot be built by $python, and no wheel was given"
fi
if [[ -d $target/octavo && -n $(where) && $(where) != $PWD/$target/* ]]; then
  missing "$python has an editable install of octavo, which hides the one given; take another Python"
fi
if ! error=$("$python" -P -c 'import octavo._native, octavo.executor.uniproc, triton, transformers' 2>&1); then
  missing "$(tail -n 1 <<<"$error"); give its wheel with --wheels"
fi
exec "$python" benchmarks/gpu_check.py "${arguments[@]}"
