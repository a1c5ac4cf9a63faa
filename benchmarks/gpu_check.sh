#!/usr/bin/env bash
# `make gpu-check`: every GPU claim, checked on this machine. Installs nothing and needs no network.
# Independent parts, each with a time limit; a log per part, JSON where a part measures, a table at the end.
#   make gpu-check PART=tests     runs one part (environment, kernels, tests, throughput, swap, publishes,
#                                 staleness, loss, learning)
#   PYTHON=…                      the interpreter (default .venv/bin/python if it exists, else python3)
#   OUT=…                         where logs and JSON go (default benchmarks/results/gpu)
set -u
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/results/gpu}
mkdir -p "$out"
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
declare -A verdicts
parts=(environment kernels tests throughput swap publishes staleness loss learning)

run_part() { # name, seconds, command…
  local name=$1 seconds=$2 began=$SECONDS; shift 2
  [ -z "${PART:-}" ] || [ "$PART" = "$name" ] || return 0
  timeout --kill-after=10 "$seconds" "$@" >"$out/$name.log" 2>&1
  local code=$?
  case $code in
    0) verdicts[$name]="passed in $((SECONDS - began)) s" ;;
    124 | 137) verdicts[$name]="FAILED: over its limit of $seconds s" ;;
    *) verdicts[$name]="FAILED with code $code; $name.log ends: $(tail -n 1 "$out/$name.log" | cut -c1-160)" ;;
  esac
}

if [ -n "${PART:-}" ] && [[ " ${parts[*]} " != *" $PART "* ]]; then
  echo "unknown part '$PART'; choose one of: ${parts[*]}"; exit 2
fi
run_part environment 15 "$python" -m inflight.cli doctor
run_part kernels 60 "$python" tests/kernel_parity.py cuda
run_part tests 100 "$python" -m pytest -q -m gpu -p no:cacheprovider tests
run_part throughput 60 "$python" -m inflight.cli bench throughput --device cuda --model qwen3-1.7b --dtype bfloat16 \
  --sequences 256 --prompt-tokens 100-1024 --tokens 100-1024 --peer transformers --pairs 1 --json "$out/throughput.json"
run_part swap 40 "$python" -m inflight.cli bench swap --device cuda --model qwen3-1.7b --dtype bfloat16 --sequences 256 \
  --tokens 1024 --publishes 50 --json "$out/swap.json"
run_part publishes 60 "$python" benchmarks/swap_growth.py cuda "$out"
run_part staleness 35 "$python" -m inflight.cli bench staleness --device cuda --model qwen3-0.6b --sequences 64 --tokens 128 \
  --steps 20 --json "$out/staleness.json"
run_part loss 50 "$python" -m inflight.cli bench loss --device cuda --dtype bfloat16 --tokens 8192 --hidden 4096 --vocab 131072 \
  --pairs 3 --json "$out/loss.json"
run_part learning 50 "$python" -m inflight.cli bench learning --device cuda --seeds 0 --steps 60 --json "$out/learning.json"

failed=0
printf '\n%-12s %s\n' part verdict
for name in "${parts[@]}"; do
  [ -n "${verdicts[$name]:-}" ] || continue
  printf '%-12s %s\n' "$name" "${verdicts[$name]}"
  [[ ${verdicts[$name]} == passed* ]] || failed=1
done
exit $failed
