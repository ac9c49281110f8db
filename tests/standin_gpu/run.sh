#!/usr/bin/env bash
# make test-gpu: set the stand-in up, once, and run the tests that are marked for it.
#   tests/standin_gpu/run.sh [ARGUMENTS OF PYTEST]      STANDIN=FOLDER names another place for it
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
STANDIN=${STANDIN:-.standin_gpu}
NEEDED_GB=6

skipped() {
  echo "test-gpu is skipped: $1"
  exit 0
}
[[ $(uname -sm) == "Linux x86_64" ]] || skipped "the stand-in is for Linux on x86-64"
command -v g++ gcc >/dev/null || skipped "it needs a C++ compiler (g++)"
if [[ ! -f $STANDIN/ready ]]; then
  mkdir -p -- "$STANDIN"
  free_gb=$(($(df --output=avail -B1000000000 -- "$STANDIN" | tail -n 1)))
  ((free_gb >= NEEDED_GB)) || skipped "it needs $NEEDED_GB GB in $STANDIN, where $free_gb are free"
  tests/standin_gpu/setup.sh "$STANDIN" . >"$STANDIN/setup.txt" 2>&1 || {
    tail -n 5 -- "$STANDIN/setup.txt"
    grep -qiE "connection|resolve|network|timed out|no matching distribution" "$STANDIN/setup.txt" &&
      skipped "the CUDA build of torch cannot be downloaded (see $STANDIN/setup.txt)"
    exit 1
  }
  touch -- "$STANDIN/ready"
fi
. "$STANDIN/env.sh"
if [[ $# -eq 0 ]]; then
  # Files, not the whole suite: other tests look at a machine without GPUs.
  set -- tests/standin_gpu tests/train/loop/test_gpu_steps.py tests/train/loop/test_identities.py \
    tests/train/data/test_kernel.py tests/train/measure/test_exposure.py
fi
"$PY" -m pytest -q -m "standin or gpu" "$@"
