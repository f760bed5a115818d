"""Compares the stages with one another and with PyTorch's own attention: a table, plots and JSON.

    python bench.py                                    # every stage that runs here, at a few sequence lengths
    python bench.py --stages naive,flash2 --seqlens 512,1024 --heads 8:2 --no-causal --out build/mine
    python bench.py --stages flash2,mine.cuh           # a file of your own beside it, in every mode
    python bench.py --rungs                            # what each rung gives: TFLOP/s as a staircase
    python bench.py --timeline --stages overlap,seamless      # what the warps of a block do side by side
    python bench.py --pass bwd                         # the gradients; fwd+bwd: both passes; all: all three
    python bench.py --mask window:1024                 # a mask, beside flex_attention and SDPA; also a&b
    python bench.py --varlen --head-dim 128            # packed sequences of mixed lengths beside one shape
    python bench.py --markdown build/bench/bench_fwd.json --seqlens 1024      # a result as a Markdown table
    python bench.py --inspect flash2                   # every access to memory of one stage, in the simulator
    python bench.py --inspect naive --line fwd_01_naive.cuh:50           # and a picture of one line's
    python bench.py --sweep flash2 --seqlens 4096      # one stage with all tile sizes that fit

A stage is checked before it is timed, against attention in float64. Its largest error in O may be twice that
of plain PyTorch, plus 1e-6; in dQ, dK and dV three times, plus 1e-6 of the gradient's largest element, or
of 1. (Plain: what goes into a product and comes out of it is of the type. The math backend, in the table,
computes 16-bit types in fp32.) Without a GPU a stage also runs once under flash.inspect(), which counts its
HBM traffic and finds data races and other mistakes.

--mask: those of flash.masks by name, with numbers: causal, window:LEFT[:RIGHT], prefix:LENGTH, padding,
document:COUNT, block_causal[:COUNT], boolean, bias, relative_bias, alibi, softcap:CAP; & joins several. Then
TFLOP/s count the scores that the mask leaves. Peers are PyTorch's flex_attention, compiled, SDPA with a dense
mask, in the backend that PyTorch chooses, and plain code.

bwd: the gradients alone are timed, for a random dO. O and L are made before, by the best forward stage.
fwd+bwd: a backward stage runs after the forward stage of its name, such as naive after naive. One without a
namesake takes the next namesake on its branch, and of that the parent: recompute runs after flash2.

Exit status: 0; 1 if a stage was wrong or failed; 2 for bad arguments; 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch loads: else its profiler writes to stderr

from flash_ladder.bench.modes import main

if __name__ == "__main__":
    sys.exit(main())
