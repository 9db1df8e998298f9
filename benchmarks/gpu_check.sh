#!/usr/bin/env bash
# Checks and measures Octavo on a GPU, in one table and under 8 minutes.
#
#   benchmarks/gpu_check.sh [--wheels FOLDER] [--out FILE] [--quick]
#
# Needs this repository, a Python with torch (for CUDA) and Triton (PYTHON names it; default: python3), and a
# C++ compiler. What else the Python lacks is installed beside it, in an environment of its own: from the
# package index, or, on a machine without a network, from the wheels in FOLDER, which
#
#   python -m pip wheel -w FOLDER . scikit-build-core nanobind cmake ninja transformers
#
# collects elsewhere with the same version of Python. Exit status: 0 all well, 1 a check failed, 3 no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
wheels=()
arguments=()
while (($#)); do
  case $1 in
    --wheels) wheels=(--no-index --find-links "$(realpath "$2")"); shift 2 ;;
    *) arguments+=("$1"); shift ;;
  esac
done
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "gpu_check: no GPU: torch of $python finds no CUDA device here; nothing was checked." >&2
  exit 3
fi
environment=build/gpu_check
if [ ! -e $environment/ready ]; then
  "$python" -m venv --clear $environment
  # The packages of $python, an environment itself perhaps, are seen from the new one.
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    > "$(echo $environment/lib/python*/site-packages)/parent.pth"
  $environment/bin/python -m pip install --quiet "${wheels[@]}" . transformers
  touch $environment/ready
fi
exec $environment/bin/python benchmarks/gpu_check.py "${arguments[@]}"
