#!/usr/bin/env bash
# Checks and measures Octavo on a GPU, in one table and under 8 minutes.
#
#   benchmarks/gpu_check.sh [--wheels FOLDER] [--out FILE] [--quick]
#
# Needs this repository and a Python (PYTHON names it; default: .venv's if there is one, or python3) that
# has torch for CUDA, Triton and transformers. Octavo itself is built from the source, which takes a C++ compiler and, in that
# Python, scikit-build-core, nanobind, cmake and ninja; or it comes from FOLDER, with whatever else the
# Python lacks: of the packages that Octavo needs here, transformers brings all but msgspec. All of it is
# installed into build/gpu_check; the Python stays as it is, and nothing is fetched from a network.
#
# FOLDER is made elsewhere, by a Python of the same version on the same kind of machine:
#
#   python -m pip wheel --no-deps -w FOLDER .
#   python -m pip wheel --no-deps -w FOLDER msgspec
#
# (--no-deps: without it torch and all of CUDA come along.) Where the versions differ, the second is
# `pip download --no-deps -d FOLDER --only-binary :all: --python-version 3.12 msgspec`, and octavo's wheel
# is left out and built on the machine.
#
# Exit status: 0 all well, 1 a check failed, 3 no GPU, 4 something that is needed is missing.
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
# -P: octavo as installed, not the folder of that name here.
where() { "$python" -P -c 'import octavo._native; print(octavo.__file__)' 2>/dev/null || true; }
if [[ ! -d $target/octavo && $(where) != $PWD/octavo/* ]]; then  # not an editable install of this folder
  "${install[@]}" --no-build-isolation . || missing "octavo cannot be built by $python, and no wheel was given"
fi
if [[ -d $target/octavo && -n $(where) && $(where) != $PWD/$target/* ]]; then
  missing "$python has an editable install of octavo, which hides the one given; take another Python"
fi
if ! error=$("$python" -P -c 'import octavo._native, octavo.llm, triton, transformers' 2>&1); then
  missing "$(tail -n 1 <<<"$error"); give its wheel with --wheels"
fi
exec "$python" benchmarks/gpu_check.py "${arguments[@]}"
