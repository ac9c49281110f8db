#!/usr/bin/env bash
# Every check and measurement of this project that needs a GPU, on one of them, in under 9 minutes.
# No network: data are embedded, weights are random. What is most in doubt comes first.
#
#   benchmarks/gpu.sh OUT              PYTHON=python3.12 benchmarks/gpu.sh OUT names another Python
#   benchmarks/gpu.sh --dry_run OUT    print the commands, one a line, and run nothing
#   benchmarks/gpu.sh --quick OUT      the smallest models: a rehearsal, no measurement
#   benchmarks/gpu.sh --only checks,formats OUT    some of checks, formats, overhead and speed, which
#                                      then have all the time: where there is a GPU for minutes only
#   DATA=FOLDER benchmarks/gpu.sh OUT  a folder with ag_news and cifar10, for the comparison of speeds
#   WHEELS=FOLDER ...                  packages that this Python lacks (benchmarks/gpu_wheels.sh)
#   LIMIT_S=2000 ...                   on a slower machine: all limits are longer in proportion
#   JOBS=4 ...                         how many runs go on beside each other where times do not matter
#
# OUT gets a table, the failures with their reasons, and an archive of records and logs. They are
# written in OUT.work: the same call again trains only the runs that have no finished record.
# A failure stops nothing. Exit code: 0 all good, 1 something failed, 2 no GPU or wrong arguments.
set -euo pipefail

PYTHON=${PYTHON:-python3}
END_S=${LIMIT_S:-500} # what is not begun by then is named as skipped, and counts as failed
MOST_BYTES=16000000   # of a file in OUT
PARTS=,checks,formats,overhead,speed,
DRY=false QUICK=false ONLY=$PARTS
while true; do
  case ${1:-} in
    --dry_run) DRY=true ;;
    --quick) QUICK=true ;;
    --only)
      ONLY=,${2:-},
      (($# == 1)) || shift
      ;;
    *) break ;;
  esac
  shift
done
[[ $ONLY != *[!a-z,]* ]] || ONLY=
for part in ${ONLY//,/ }; do
  [[ $PARTS == *",$part,"* ]] || ONLY=
done
if [[ $# -ne 1 || -z $1 || $1 == -* || -z ${ONLY//,/} ]]; then
  echo "usage: ${0##*/} [--dry_run] [--quick] [--only checks,formats,overhead,speed] OUT" >&2
  exit 2
fi
OUT=$(realpath -m -- "$1")
WORK=$OUT.work
if [[ $PYTHON == */* ]]; then
  PYTHON=$(realpath -ms -- "$PYTHON") # no link is followed: it may be that of a virtual environment
fi
[[ -z ${WHEELS:-} ]] || WHEELS=$(realpath -m -- "$WHEELS")
[[ -z ${DATA:-} ]] || DATA=$(realpath -m -- "$DATA")
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

# The driver is asked for GPUs, so that nothing initialises CUDA before its time.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTORCH_NVML_BASED_CUDA_CHECK=1

if ! $DRY; then
  seen=$("$PYTHON" -c 'import torch; print(torch.cuda.is_available())' 2>&1 | tail -n 1) || true
  if [[ $seen != True ]]; then
    echo "${0##*/}: no GPU to measure on ($PYTHON says: $seen)" >&2
    exit 2
  fi
  mkdir -p -- "$OUT" "$WORK/logs"
  : >"$OUT/failures.txt"
  if [[ -n ${WHEELS:-} ]]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --upgrade --target "$WORK/packages" "$WHEELS"/*.whl
    export PYTHONPATH=$WORK/packages${PYTHONPATH:+:$PYTHONPATH}
  fi
  # Prepared data are shared by the runs; nothing is left in the user's own cache.
  HF_HOME=$(mktemp -d)
  export HF_HOME
  trap 'rm -rf -- "$HF_HOME"' EXIT
fi
RAN=0

# The lines of a log that say what went wrong: not the footer that torchrun puts under them.
reasons() {
  local said='^(\[[^]]*\] *|\[?rank[0-9]+\]?: *)?(oom|failed|diverged|interrupted): |(Error|Exception|error): |^(FAILED|ERROR|E  ) '
  local lines
  lines=$(grep -aE "$said" -- "$1" | grep -avE 'ChildFailedError|SignalException|^[EWI][0-9]{4} ' | tail -n 3 | cut -c1-600) || true
  [[ -n $lines ]] || lines=$(grep -avE '^[EWI][0-9]{4} ' -- "$1" | tail -n 3 | cut -c1-600) || true
  [[ -n $lines ]] || lines="it wrote nothing"
  sed 's/^/    /' <<<"$lines"
}

# attempt NAME SECONDS COMMAND...: run it, keep its output, note a failure and go on.
attempt() {
  local name=$1 seconds=$(($2 * END_S / 500)) left=$((LIMIT_S - SECONDS)) began=$SECONDS code=0 why=
  shift 2
  [[ ${ONLY}table, == *",$PART,"* ]] || return 0
  if $DRY; then
    printf '%q ' "$@"
    printf '\n'
    return
  fi
  RAN=$((RAN + 1))
  if ((left < 15)); then
    code=skipped
  else
    seconds=$((seconds < left ? seconds : left))
    # torchrun gives its processes 30 s to end before it kills them; it must not go before.
    timeout --kill-after=35 "$seconds" "$@" >"$WORK/logs/$name.txt" 2>&1 || code=$?
    ((code != 124 && code != 137)) || why="    it did not end within $seconds s"$'\n'
    ((code == 0)) || why+=$(reasons "$WORK/logs/$name.txt")
  fi
  echo "$name: $code ($((SECONDS - began)) s)"
  # Written in one piece, because other attempts may write at the same time.
  [[ $code == 0 ]] || echo "$name: $code  $*${why:+$'\n'}$why" >>"$OUT/failures.txt"
}

# beside NAME SECONDS COMMAND...: attempt it while others run, where times do not matter: most of
# such a run is its start.
beside() {
  if $DRY || [[ $ONLY != *",$PART,"* ]]; then
    attempt "$@"
    return
  fi
  while (($(jobs -rp | wc -l) >= JOBS)); do wait -n || true; done
  RAN=$((RAN + 1))
  # Fewer threads are faster than threads that wait for each other on cores that other runs use.
  OMP_NUM_THREADS=$((($(nproc) + JOBS - 1) / JOBS)) attempt "$@" &
}
JOBS=${JOBS:-$((($(nproc) + 3) / 4))}

# part NAME SHARE: the commands that follow belong to this part, which ends after SHARE % of the
# time, because the parts after it need the rest.
part() {
  PART=$1 LIMIT_S=$END_S
  [[ $ONLY != "$PARTS" ]] || LIMIT_S=$((END_S * $2 / 100))
}

# The sizes of all runs: a few seconds of training each on a large GPU.
if $QUICK; then
  BERT=bert-nano DISTILBERT=bert-nano VIT=vit-nano VIT32=vit-nano VIT_SMALL=vit-nano
  SIZE=(--quick) SPEED=(--quick) SIZES=(--tiny --max_steps 6) LENGTH=48 LARGE=(--per_gpu_batch 16) SMALL=(--image_size 16 --per_gpu_batch 8)
else
  BERT=bert-base DISTILBERT=distilbert-base VIT=vit-base-patch16 VIT32=vit-base-patch32 VIT_SMALL=vit-small-patch32
  SIZE=() SPEED=(--gpu) SIZES=(--max_steps 40) LENGTH=128
  LARGE=(--image_size 224 --per_gpu_batch 32) SMALL=(--image_size 32 --per_gpu_batch 32)
fi
RESNET=resnet-18-cifar
COMMON=("${SIZES[@]}" --epochs 1 --save none --log_every 10 --lr 1e-4)
MEASURED=(--output_dir "$WORK/records") CHECKED=(--output_dir "$WORK/checks")
TEXT=(--dataset embedded:english --train_size all --test_size 256 --max_length "$LENGTH" --per_gpu_batch 32)
IMAGE=(--dataset embedded:digits --train_size 1280 --test_size 256)
TORCHRUN=("$PYTHON" -m torch.distributed.run --standalone --nproc_per_node=1)
TWO=("$PYTHON" -m benchmarks.two_ranks)

bert() { attempt "bert_$1" 60 "$PYTHON" bert.py "${TEXT[@]}" "${MEASURED[@]}" "${COMMON[@]}" "${@:2}"; }
vit() { attempt "vit_$1" 60 "$PYTHON" vit.py "${IMAGE[@]}" "${MEASURED[@]}" "${COMMON[@]}" "${@:2}"; }
bert_check() { beside "bert_$1" 90 "$PYTHON" bert.py "${TEXT[@]}" "${CHECKED[@]}" "${COMMON[@]}" "${@:2}"; }
vit_check() { beside "vit_$1" 120 "$PYTHON" vit.py "${IMAGE[@]}" "${CHECKED[@]}" "${COMMON[@]}" "${@:2}"; }
bert_run() {
  beside "bert_$1" 90 "${TORCHRUN[@]}" bert.py "${TEXT[@]}" "${CHECKED[@]}" "${COMMON[@]}" "${@:2}"
}
vit_run() { beside "vit_$1" 90 "${TORCHRUN[@]}" vit.py "${IMAGE[@]}" "${CHECKED[@]}" "${COMMON[@]}" "${@:2}"; }
# Two ranks with NCCL on the one GPU, over sockets: whether exchanges work, not how fast. The model
# is small: its gradients of 88 MB take an eighth of a second.
vit_two() {
  beside "vit_two_$1" 90 "${TWO[@]}" vit.py "${IMAGE[@]}" "${CHECKED[@]}" "${COMMON[@]}" \
    --model "$VIT_SMALL" "${LARGE[@]}" --setup 2_1 "${@:2}"
}
# Two nodes with a link between them, on one GPU.
NODES=("$PYTHON" -m harness nodes 2 --link 5ms/1gbit --oversubscribe --
  "$PYTHON" -m torch.distributed.run --nproc_per_node=1)
linked() {
  attempt "linked_$1" 90 "${NODES[@]}" vit.py "${IMAGE[@]}" "${CHECKED[@]}" "${COMMON[@]}" \
    --model "$RESNET" "${SMALL[@]}" --setup 2_1 "${@:2}"
}

part checks 56
attempt environment 60 "$PYTHON" -m harness env
# Single files, as other files of the suite may need packages that are not installed.
attempt tests 120 "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu \
  tests/train/loop/test_gpu_steps.py tests/train/loop/test_identities.py \
  tests/train/data/test_kernel.py tests/train/measure/test_exposure.py
attempt roofline 30 "$PYTHON" -m benchmarks.roofline bf16 "${SIZE[@]}"

# One process, measured: the kernel for packed texts.
bert base_bf16 --model "$BERT" --strategy single --precision bf16
# What works and what does not.
vit_two ddp
vit_two fsdp --strategy fsdp
vit_two fsdp_offload --strategy fsdp --fsdp_offload --precision bf16
vit_two diloco --strategy diloco --sync_every 6 --sync_scope rank --compress int8 --fragments 2 \
  --overlap 2 --precision bf16
vit_check compile_bf16 --model "$VIT" "${LARGE[@]}" --precision bf16 --torch_compile
vit_run resnet_ddp_sync --model "$RESNET" "${SMALL[@]}" --strategy ddp --setup 1_1 --batchnorm sync
bert_check dp_bf16 --model "$DISTILBERT" --strategy dp --precision bf16
bert_run ddp_powersgd --model "$DISTILBERT" --strategy ddp --setup 1_1 --compress powersgd:4
vit_run ddp_fp16 --model "$VIT32" "${LARGE[@]}" --strategy ddp --setup 1_1 --precision fp16
bert_run fsdp_offload_bf16 --model "$BERT" --strategy fsdp --fsdp_offload --precision bf16
if $DRY || "$PYTHON" -c 'import hivemind' 2>/dev/null; then
  vit_check hivemind --model "$VIT32" "${LARGE[@]}" --strategy hivemind --target_batch 128
fi
# A sweep: its warm launcher must leave CUDA alone, or no run of it starts.
beside sweep 90 "$PYTHON" -m harness sweep experiments/precision.yaml --tiny --limit 0:4 \
  --isolation off "${CHECKED[@]}"
wait
# Alone: programs beside them on the GPU delay every message.
attempt link 60 "${NODES[@]}" -m harness link --mb 1
linked ddp
linked diloco --strategy diloco --sync_every 10 --compress int8
# Number formats, measured.
part formats 56
for precision in fp32 tf32 bf16 fp16; do
  vit "base16_$precision" --model "$VIT" "${LARGE[@]}" --precision "$precision"
done

# What the apparatus costs.
part overhead 72
attempt overhead 100 "$PYTHON" -m benchmarks.overhead --pairs 3 --no_start_up "${SIZE[@]}" --out "$WORK/overhead.json"
attempt telemetry 60 "$PYTHON" -m benchmarks.overhead --telemetry 6 --cases bert-nano "${SIZE[@]}" \
  --out "$WORK/telemetry.json"
# Speed against what a user would run instead: whole epochs with evaluation, each model beside the
# measured peak of a matrix product: as many runs as the time allows, each in turn.
part speed 100
LEFT_S=$((LIMIT_S - SECONDS)) # the last run that is begun is to end in it
attempt speed 500 "$PYTHON" -m benchmarks.speed "${SPEED[@]}" --arms examples,loop,ours --rounds 2 \
  --limit_s "$((LEFT_S > 31 ? LEFT_S - 30 : 1))" ${DATA:+--data "$DATA"} --out "$WORK/speed"
PART=table LIMIT_S=$((END_S + 30)) # the table is made in any case
if [[ $ONLY == *,checks,* || $ONLY == *,formats,* ]]; then
  attempt table 60 "$PYTHON" -m harness table "$WORK/records"
fi
if $DRY; then
  exit 0
fi

cat -- "$WORK/logs/table.txt" "$WORK/overhead.md" "$WORK/telemetry.md" "$WORK/speed/speed.md" \
  "$WORK/logs/roofline.txt" "$WORK/logs/link.txt" >"$OUT/table.txt" 2>/dev/null || true
# Three files, or a few more where the archive is too large for one.
tar -C "$WORK" --exclude='checkpoint-*' --exclude=packages -czf "$WORK/gpu.tar.gz" \
  -- $(cd "$WORK" && ls | grep -v '^gpu.tar') 2>/dev/null || true
rm -f -- "$OUT"/gpu.tar.gz*
if (($(stat -c %s "$WORK/gpu.tar.gz") > MOST_BYTES)); then
  split -b "$MOST_BYTES" -d -a 1 -- "$WORK/gpu.tar.gz" "$OUT/gpu.tar.gz."
  rm -f -- "$OUT"/gpu.tar.gz.[5-9]
else
  cp -- "$WORK/gpu.tar.gz" "$OUT/"
fi
cat -- "$OUT/table.txt" "$OUT/failures.txt"
FAILED=$(grep -c '^[^ ]' -- "$OUT/failures.txt" || true)
echo "$FAILED of $RAN failed, $SECONDS s: $OUT"
((FAILED == 0))
