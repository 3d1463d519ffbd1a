#!/usr/bin/env bash
# Runs parts on a machine with a GPU, each alone under its own time limit:
#
#     OUT=/tmp/out bash tools/gpu/run.sh first
#     OUT=/tmp/out bash tools/gpu/run.sh zero_copy=120 host
#
# PART or PART=SECONDS; `first`, `second` and `third` are sets that fit a call each.
# PART+PART run side by side. Writes $OUT/PART.log and what the part itself writes.
# What it needs, and what it asks: docs/gpu_todo.md.
set -u
cd "$(dirname "$0")/../.."
out=${OUT:?a folder for results}
trace=${TRACE:-.carry/data/routing/trace_qwen3_30b_a3b.csv.gz}
data=${trace%/routing/*}

# Seconds of a part, where none are given.
declare -A seconds=(
  [zero_copy]=125 [layered]=100 [host]=75 [bits]=75 [bits_level0]=75
  [bits_deterministic]=75 [attention]=60 [prompt]=45 [traced]=155
  [traced_prefill]=150 [build]=50 [tests]=75 [quickstart]=75 [serve]=45
  [states]=60 [packed]=110 [prefetch]=100 [assist]=130 [kernels]=60 [generate]=45
  [machine]=60 [coserve]=120 [pretrain]=570
)
declare -A sets=(
  [first]="zero_copy layered host"
  [second]="traced bits+bits_level0+bits_deterministic+build tests"
  [third]="attention prompt quickstart serve"
)

part() { # its command; stands in the place of this shell
  local python="timeout -s INT -k 8 $2 python3"
  local given="--trace $trace --out_dir $out"
  case $1 in
    zero_copy | layered | host | attention | prompt | states | packed | prefetch | assist | kernels) $python "tools/gpu/$1.py" $given ;;
    bits) $python tools/gpu/bits.py $given ;;
    bits_level0) XLA_FLAGS=--xla_gpu_autotune_level=0 \
      $python tools/gpu/bits.py $given --name "$1" ;;
    bits_deterministic) XLA_FLAGS=--xla_gpu_deterministic_ops=true \
      $python tools/gpu/bits.py $given --name "$1" ;;
    traced) $python launch/study.py benchmark_traced --data_dir "$data" \
      --gin_file configs/experiments/benchmark_traced_h200.gin --out_dir "$out/traced" ;;
    traced_prefill) $python launch/study.py benchmark_traced --data_dir "$data" \
      --gin_file configs/examples/benchmark_traced_prefill_h200.gin \
      --out_dir "$out/traced_prefill" ;;
    build) # the CPU's kernels, without which their tests are skipped
      $python setup.py -q build_ext --inplace ;;
    tests) # exact products, so that tolerances are those of a CPU
      export JAX_PLATFORMS=cuda,cpu XLA_FLAGS=--xla_gpu_autotune_level=0
      export MOE_EDGE_PARTS=3 XLA_PYTHON_CLIENT_MEM_FRACTION=.04
      # To one process: its workers end with it, and it still reports.
      timeout --foreground -s INT -k 8 "$2" python3 -m pytest ${TESTS:-tests/engine tests/model tests/kernels tests/offload} \
        -n 12 --maxprocesses 12 -v --tb=short -p no:benchmark -p no:cacheprovider ;;
    quickstart) $python launch/quickstart.py --out_dir "$out/quickstart" ;;
    serve) $python tools/gpu/serve.py --out_dir "$out" ;;
    generate) $python launch/generate.py --checkpoint default \
      --prompt "Anna put the key on the table. Ben" --max_new_tokens 32 ;;
    machine) $python launch/profile_machine.py --checkpoint default \
      --out_dir "$out/machine" ;;
    coserve) $python launch/study.py coserve_fig1 \
      --gin_file configs/experiments/coserve_fig1.gin --out_dir "$out/coserve_fig1" ;;
    pretrain) $python tools/gpu/pretrain.py --data_dir "$data" --out_dir "$out" ;;
  esac
}

asked=()
for each in "$@"; do asked+=(${sets[$each]:-$each}); done
for group in "${asked[@]}"; do
  for each in ${group//+/ }; do
    if [ -z "${seconds[${each%%=*}]:-}" ]; then
      echo "unknown part ${each%%=*}; known: ${!sets[*]} ${!seconds[*]}" >&2
      exit 2
    fi
  done
done
if [ ${#asked[@]} = 0 ]; then
  echo "no part given; known: ${!sets[*]} ${!seconds[*]}" >&2
  exit 2
fi

mkdir -p "$out"
for wheel in .carry/wheels/*.whl; do # one that does not fit must not lose the others
  [ -e "$wheel" ] && python3 -m pip install -q --no-index --no-deps --no-compile \
    --no-cache-dir --target /tmp/site "$wheel"
done
export PYTHONPATH=$PWD:/tmp/site PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=3
export XLA_PYTHON_CLIENT_PREALLOCATE=false GLIBC_TUNABLES=glibc.malloc.hugetlb=1

one() { # a part, its log and the log's end
  local name=${1%%=*} limit=${seconds[${1%%=*}]} begun=$SECONDS
  [ "$1" != "$name" ] && limit=${1#*=}
  (part "$name" "$limit") > "$out/$name.log" 2>&1
  local code=$?
  echo "== $name: exit code $code after $((SECONDS - begun)) of $limit s"
  tail -c 900 "$out/$name.log"
}
for group in "${asked[@]}"; do
  pids=()
  for each in ${group//+/ }; do
    one "$each" &
    pids+=($!)
  done
  wait "${pids[@]}"
done
echo "== all parts after $SECONDS s"
