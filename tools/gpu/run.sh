#!/usr/bin/env bash
# Runs parts on a machine with a GPU, each alone under its own time limit:
#
#     OUT=/tmp/out bash tools/gpu/run.sh first
#     OUT=/tmp/out bash tools/gpu/run.sh zero_copy=120 host
#
# PART or PART=SECONDS; `first` to `sixth` are sets that fit a call each.
# PART+PART run side by side. After each group $OUT/results.tar.gz holds PART.log and
# what the parts wrote: a lent machine gives back eight files at most.
# TINY=1: small sizes, to try parts on a CPU.
# What it needs, and what it asks: docs/gpu_todo.md.
set -u
cd "$(dirname "$0")/../.."
given_out=${OUT:?a folder for results}
trace=${TRACE:-.carry/data/routing/trace_qwen3_30b_a3b.csv.gz}
data=${trace%/routing/*}
tiny=${TINY:-}
tokens=${TINY:+2}

# Seconds of a part, where none are given.
declare -A seconds=(
  [zero_copy]=125 [layered]=100 [host]=75 [bits]=75 [bits_level0]=75
  [bits_deterministic]=75 [attention]=60 [prompt]=45 [traced]=155
  [traced_prefill]=150 [build]=90 [tests]=75 [quickstart]=75 [serve]=45
  [states]=60 [packed]=110 [prefetch]=100 [turns]=110 [assist]=130 [kernels]=90 [generate]=45
  [machine]=60 [coserve]=120 [pretrain]=570 [peers]=140
  [bring]=120
  [smoe_fig11]=240 [smoe_fig14]=180 [moe_prism_fig8]=240
)
# One lease: `first`, whose answers decide defaults, then `second`.
declare -A sets=(
  [first]="zero_copy packed+build prefetch assist"
  [second]="traced peers"
  [third]="states+build turns kernels layered host"
  [fourth]="bits+bits_level0+bits_deterministic+build tests quickstart generate serve"
  [fifth]="attention prompt machine coserve"
  [sixth]="smoe_fig14 smoe_fig11"
)

part() { # its command; stands in the place of this shell
  local python="timeout -s INT -k 8 $2 python3"
  local data_dir="--data_dir $data"
  local given="--trace $trace --out_dir $out${tiny:+ --layers 2 --rounds 1}"
  case $1 in
    zero_copy | layered | host | attention | prompt | states | packed | prefetch | turns | assist | kernels | peers) $python "tools/gpu/$1.py" $given ;;
    bits) $python tools/gpu/bits.py $given ;;
    bits_level0) XLA_FLAGS=--xla_gpu_autotune_level=0 \
      $python tools/gpu/bits.py $given --name "$1" ;;
    bits_deterministic) XLA_FLAGS=--xla_gpu_deterministic_ops=true \
      $python tools/gpu/bits.py $given --name "$1" ;;
    traced) $python launch/study.py benchmark_traced $data_dir --out_dir "$out/traced" \
      --gin_file configs/experiments/benchmark_traced_h200.gin ;;
    traced_prefill) $python launch/study.py benchmark_traced $data_dir --out_dir "$out/$1" \
      --gin_file configs/examples/benchmark_traced_prefill_h200.gin ;;
    smoe_fig11 | smoe_fig14 | moe_prism_fig8) $python launch/study.py "$1" $data_dir \
      --gin_file "configs/examples/${1}_h200.gin" --out_dir "$out/${1}_h200" ;;
    coserve) $python launch/study.py coserve_fig1 --out_dir "$out/coserve_fig1" \
      --gin_file configs/experiments/coserve_fig1.gin ${tiny:+--gin_param
      "coserve_fig1.networks = ('board_resnet',)" --gin_param coserve_fig1.small_batch=2} ;;
    build) # the CPU's kernels, without which their tests are skipped
      $python setup.py -q build_ext --inplace ;;
    tests) # exact products, so that tolerances are those of a CPU
      export JAX_PLATFORMS=cuda,cpu XLA_FLAGS=--xla_gpu_autotune_level=0
      export MOE_EDGE_PARTS=3 XLA_PYTHON_CLIENT_MEM_FRACTION=.04
      # To one process: its workers end with it, and it still reports.
      timeout --foreground -s INT -k 8 "$2" python3 -m pytest ${TESTS:-tests/engine tests/model tests/kernels tests/offload} \
        -n 12 --maxprocesses 12 -v --tb=short -p no:benchmark -p no:cacheprovider ;;
    quickstart) $python launch/quickstart.py --out_dir "$out/quickstart" ;;
    serve) $python tools/gpu/serve.py --out_dir "$out" --tokens ${tokens:-64} ;;
    generate) $python launch/generate.py --checkpoint default \
      --prompt "Anna put the key on the table. Ben" --max_new_tokens ${tokens:-32} ;;
    machine) $python launch/profile_machine.py --checkpoint default --out_dir "$out/$1" \
      ${tiny:+--max_batch 1 --d_model 256 --expert_dim 256 --most_tokens 8 --repeats 1} ;;
    pretrain) # its run stays there, for the same command to go on, and for `bring`
      [ -e .carry/texts.tar.xz ] && mkdir -p "$run/texts" && tar -xJf .carry/texts.tar.xz -C "$run/texts"
      $python tools/gpu/pretrain.py --data_dir "$run/texts" --run_dir "$run/model" \
        --out_dir "$out" ${tiny:+--minutes .01} ;;
    bring) # 60 MiB of what was trained; with the archive, a call gives back 64
      [ -e "$run/larger" ] ||
        $python launch/model_card.py --run_dir "$run/model" --out_dir "$run/larger" || exit
      tar --sort=name -cf - -C "$run" larger | tail -c +$((1 + ${FROM_MIB:-0} * 1048576)) |
        head -c 60M | split -d -b 15M - "$given_out/model.$(printf %03d ${FROM_MIB:-0})." ;;
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

mkdir -p "$given_out"
out=$(mktemp -d) run=${RUN_DIR:-/tmp/pretrain}
for wheel in .carry/wheels/*.whl; do # one that does not fit must not lose the others
  [ -z "$tiny" ] && [ -e "$wheel" ] && python3 -m pip install -q --no-index --no-deps --no-compile \
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
  tar -czf "$given_out/results.tar.gz" -C "$out" .
done
rm -r "$out"
echo "== all parts after $SECONDS s"
