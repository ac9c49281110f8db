#!/usr/bin/env bash
# Every check and measurement of this project that needs a GPU, on one of them, in under 9 minutes.
# No network: data are embedded, weights are random. Records, logs and tables go to a folder.
#
#   benchmarks/gpu.sh OUT              PYTHON=python3.12 benchmarks/gpu.sh OUT names another Python
#   benchmarks/gpu.sh --dry_run OUT    print the commands, one a line, and run nothing
#   DATA=FOLDER benchmarks/gpu.sh OUT  a folder with ag_news and cifar10, for the comparison of speeds
#
# A failure stops nothing. The same call again trains only the runs that have no finished record.
# Exit code: 0 all good, 1 something failed, 2 no GPU or wrong arguments.
set -euo pipefail

PYTHON=${PYTHON:-python3}
LIMIT_S=500 # what is not begun by then is named as skipped, and counts as failed
DRY=false
if [[ ${1:-} == --dry_run ]]; then
  DRY=true
  shift
fi
if [[ $# -ne 1 || -z $1 || $1 == -* ]]; then
  echo "usage: ${0##*/} [--dry_run] OUT" >&2
  exit 2
fi
OUT=$(realpath -m -- "$1")
if [[ $PYTHON == */* ]]; then
  PYTHON=$(realpath -ms -- "$PYTHON") # no link is followed: it may be that of a virtual environment
fi
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false

if ! $DRY; then
  seen=$("$PYTHON" -c 'import torch; print(torch.cuda.is_available())' 2>&1 | tail -n 1) || true
  if [[ $seen != True ]]; then
    echo "${0##*/}: no GPU to measure on ($PYTHON says: $seen)" >&2
    exit 2
  fi
  mkdir -p -- "$OUT/logs"
  : >"$OUT/failures.txt"
  # Prepared data are shared by the runs; nothing is left in the user's own cache.
  HF_HOME=$(mktemp -d)
  export HF_HOME
  trap 'rm -rf -- "$HF_HOME"' EXIT
fi
FAILED=0 RAN=0

# attempt NAME SECONDS COMMAND...: run it, keep its output, note a failure and go on.
attempt() {
  local name=$1 seconds=$2 left=$((LIMIT_S - SECONDS)) began=$SECONDS code=0
  shift 2
  if $DRY; then
    printf '%q ' "$@"
    printf '\n'
    return
  fi
  RAN=$((RAN + 1))
  if ((left < 15)); then
    code=skipped
  else
    # torchrun gives its processes 30 s to end before it kills them; it must not go before.
    timeout --kill-after=35 "$((seconds < left ? seconds : left))" "$@" \
      >"$OUT/logs/$name.txt" 2>&1 || code=$?
  fi
  echo "$name: $code ($((SECONDS - began)) s)"
  if [[ $code != 0 ]]; then
    FAILED=$((FAILED + 1))
    {
      echo "$name: $code  $*"
      [[ $code == skipped ]] || tail -n 3 -- "$OUT/logs/$name.txt" | sed 's/^/    /'
    } >>"$OUT/failures.txt"
  fi
}

# The sizes of all runs: a few seconds of training each on a large GPU.
COMMON=(--output_dir "$OUT/records" --max_steps 40 --epochs 1 --save none --log_every 10 --lr 1e-4)
TEXT=(--dataset embedded:english --train_size all --test_size 256 --max_length 128)
IMAGE=(--dataset embedded:digits --train_size 1280 --test_size 256)
LARGE=(--image_size 224 --per_gpu_batch 32)
SMALL=(--image_size 32 --per_gpu_batch 32)
TORCHRUN=("$PYTHON" -m torch.distributed.run --standalone --nproc_per_node=1)

bert() { attempt "bert_$1" 60 "$PYTHON" bert.py "${TEXT[@]}" --per_gpu_batch 32 "${COMMON[@]}" "${@:2}"; }
vit() { attempt "vit_$1" 60 "$PYTHON" vit.py "${IMAGE[@]}" "${COMMON[@]}" "${@:2}"; }
bert_run() {
  attempt "bert_$1" 60 "${TORCHRUN[@]}" bert.py "${TEXT[@]}" --per_gpu_batch 32 "${COMMON[@]}" "${@:2}"
}
vit_run() { attempt "vit_$1" 60 "${TORCHRUN[@]}" vit.py "${IMAGE[@]}" "${COMMON[@]}" "${@:2}"; }

# The tests that need a GPU.
attempt tests 120 "$PYTHON" -m pytest -q -m gpu

# Strategies: the ways that nothing but a GPU can prove.
bert_run ddp_bf16 --model bert-base --strategy ddp --setup 1_1 --precision bf16
bert_run fsdp_bf16 --model bert-base --strategy fsdp --precision bf16
bert_run fsdp_offload_bf16 --model bert-base --strategy fsdp --fsdp_offload --precision bf16
vit_run fsdp_grads_fp32 --model vit-base-patch32 "${LARGE[@]}" --strategy fsdp --fsdp_shard grads
vit_run resnet_ddp_sync --model resnet-18-cifar "${SMALL[@]}" --strategy ddp --batchnorm sync
vit_run fsdp_fp16 --model vit-base-patch32 "${LARGE[@]}" --strategy fsdp --precision fp16
vit_run ddp_fp16 --model vit-base-patch32 "${LARGE[@]}" --strategy ddp --precision fp16
# Those for slow links, on NCCL: one process, so that their hooks and exchanges run as they are.
bert_run ddp_hook_bf16 --model distilbert-base --strategy ddp --compress bf16
bert_run ddp_powersgd --model distilbert-base --strategy ddp --compress powersgd:4
vit_run local_sgd --model vit-base-patch32 "${LARGE[@]}" --strategy local_sgd --sync_every 10
vit_run diloco --model vit-base-patch32 "${LARGE[@]}" --strategy diloco --sync_every 10 \
  --compress int8 --fragments 2 --overlap 2 --precision bf16
if $DRY || "$PYTHON" -c 'import hivemind' 2>/dev/null; then
  vit hivemind --model vit-base-patch32 "${LARGE[@]}" --strategy hivemind --target_batch 128
fi
bert dp_fp32 --model distilbert-base --strategy dp
bert dp_bf16 --model distilbert-base --strategy dp --precision bf16

# Number formats, on one device.
for precision in fp32 tf32 bf16 fp16; do
  bert "base_$precision" --model bert-base --strategy single --precision "$precision"
  vit "base16_$precision" --model vit-base-patch16 "${LARGE[@]}" --precision "$precision"
done
bert distilbert_bf16 --model distilbert-base --precision bf16
vit base32_bf16 --model vit-base-patch32 "${LARGE[@]}" --precision bf16
vit resnet_bf16 --model resnet-18-cifar "${SMALL[@]}" --precision bf16
attempt vit_compile_bf16 120 "$PYTHON" vit.py "${IMAGE[@]}" "${COMMON[@]}" \
  --model vit-base-patch16 "${LARGE[@]}" --precision bf16 --torch_compile

# A sweep: its warm launcher must leave CUDA alone, or no run of it starts. One seed of each format.
attempt sweep 90 "$PYTHON" -m harness sweep experiments/precision.yaml --tiny --limit 0:8 \
  --isolation off --output_dir "$OUT/records"

# What the apparatus costs, and the table of all runs.
attempt overhead 120 "$PYTHON" benchmarks/overhead.py --pairs 3 --no_start_up --out "$OUT/overhead.json"
attempt telemetry 90 "$PYTHON" benchmarks/overhead.py --telemetry 8 --cases bert-nano \
  --out "$OUT/telemetry.json"
# Against what a user would run instead: as many runs as the time allows, each in turn.
LEFT_S=$((LIMIT_S - SECONDS - 30)) # the last run that is begun is to end
attempt speed 180 "$PYTHON" -m benchmarks.speed --gpu --arms seed2,examples,loop,ideal,ours \
  --rounds 2 --limit_s "$((LEFT_S < 150 ? LEFT_S : 150))" ${DATA:+--data "$DATA"} --out "$OUT/speed"
LIMIT_S=530 # the table is made in any case
attempt table 60 "$PYTHON" -m harness table "$OUT/records"
if $DRY; then
  exit 0
fi
mv -- "$OUT/logs/table.txt" "$OUT/table.txt"
cat -- "$OUT/table.txt" "$OUT/overhead.md" "$OUT/telemetry.md" "$OUT/speed/speed.md" "$OUT/failures.txt" 2>/dev/null || true
echo "$FAILED of $RAN failed, $SECONDS s: $OUT"
((FAILED == 0))
