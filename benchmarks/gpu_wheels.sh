#!/usr/bin/env bash
# Gather what a GPU box without network and with an older stack lacks, for WHEELS=FOLDER of gpu.sh.
#
#   benchmarks/gpu_wheels.sh FOLDER                       the packages that are mostly missing
#   benchmarks/gpu_wheels.sh FOLDER transformers evaluate others, in the versions of this checkout
#   PYTHON_VERSION=3.12 benchmarks/gpu_wheels.sh FOLDER   for the Python of that box (3.12)
#
# Not torch: it is as large as all others together, and fits the driver of that box.
set -euo pipefail
if [[ $# -lt 1 || $1 == -* ]]; then
  echo "usage: ${0##*/} FOLDER [PACKAGE...]" >&2
  exit 2
fi
FOLDER=$(realpath -m -- "$1")
shift
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-.venv/bin/python}
PACKAGES=("$@")
((${#PACKAGES[@]})) || PACKAGES=(transformers accelerate datasets evaluate dill multiprocess tokenizers
  huggingface_hub httpx2 httpcore2 truststore xxhash nvidia-ml-py rich scikit-learn)
# As they are installed here, so that the versions fit each other and constraints.txt.
mapfile -t PINNED < <("$PYTHON" -c 'import sys
from importlib.metadata import version
for name in sys.argv[1:]: print(f"{name}=={version(name)}")' "${PACKAGES[@]}")
((${#PINNED[@]} == ${#PACKAGES[@]})) || exit 1
mkdir -p -- "$FOLDER"
"$PYTHON" -m pip download -q --no-deps --only-binary=:all: --implementation cp \
  --python-version "${PYTHON_VERSION:-3.12}" --platform manylinux_2_28_x86_64 \
  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any \
  --dest "$FOLDER" -- "${PINNED[@]}"
du -shc -- "$FOLDER"/*.whl
