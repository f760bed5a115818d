#!/bin/sh
# What is measured anew in a round on a GPU, the quickest first:
#
#   sh results/gpu_round.sh results/h200 [test libraries rungs without timeline ratios host counters sanitizer]
#
# Without names: all. Each part stands alone. FlashAttention-3 is among the libraries if FA3 names a file with
# torch.ops.flash_attn_3, and CUDART the CUDA runtime that it needs. Counters need ncu on the PATH, sanitizer
# compute-sanitizer. In the end `make readme` writes the figures into headers and docs.
set -e
cd "$(dirname "$0")/.."
to=${1:?the folder of this GPU, such as results/h200}
shift
python=${PYTHON:-.venv/bin/python}
mkdir -p "$to/timeline"
for part in ${*:-test libraries rungs without timeline ratios host counters sanitizer}; do
  echo "== $part"
  case $part in
    test) $python -m pytest -q -n 4 --dist loadgroup tests/test_hopper.py tests/test_forward.py &&
          $python -m pytest -q -n 4 --dist loadgroup -k 'not cpu' tests/test_backward.py \
            tests/test_call.py tests/test_extras.py tests/test_kvcache.py tests/test_masks.py tests/test_varlen.py ;;
    libraries) $python results/hopper.py "$to" ${FA3:+--fa3 "$FA3"} ${CUDART:+--cudart "$CUDART"} ;;
    rungs) $python bench.py --rungs --out "$to" ;;
    without) $python results/without.py "$to" ;;
    timeline) for pass in fwd bwd; do
                $python bench.py --timeline --pass $pass --seqlens 4096 --out "$to/timeline"
              done ;;
    ratios) $python results/ratios.py "$to" ;;
    host) $python results/host.py "$to" ;;
    counters) $python results/ncu.py "$to" && $python results/ncu.py "$to" --pass bwd &&
              $python results/ncu_hopper.py "$to" ${FA3:+--fa3 "$FA3"} ${CUDART:+--cudart "$CUDART"} ;;
    sanitizer) $python results/sanitizer.py "$to" ;;
    *) echo "no part $part" >&2; exit 2 ;;
  esac
done
