"""FlashAttention in CUDA, one stage at a time: the Python side.

    import torch, flash
    q, k, v = torch.randn(3, 1, 2, 128, 64)             # (B, H, N, d)
    o = flash.attention(q, k, v, causal=True)           # the best stage for these tensors
    o = flash.attention(q, k, v, stage="tiled", Br=32)  # one stage, with a tile size of your own

    q.requires_grad_()                                  # the same for the gradients' stage
    flash.attention(q, k, v, backward="naive", Bc_bwd=16).square().sum().backward()

CUDA tensors run on their GPU; CPU tensors run in the simulator, which executes the same kernels. A stage is a
.cuh file in stages/, described by the first lines of its own header; `python flash.py` lists them. Each is
compiled on first use, for exactly what the call needs, and anew after every edit. How a call goes down to its
kernel: flash_ladder/attention.py, plan.py, launch.py.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from flash_ladder import __version__, masks
from flash_ladder.ahead import compile
from flash_ladder.attention import attention
from flash_ladder.checks import MAX_HEAD_DIM
from flash_ladder.devices import default_device, describe_device, shared_memory_per_block
from flash_ladder.inspection import can_inspect, inspect
from flash_ladder.kvcache import attention_kvcache
from flash_ladder.launch import definitions
from flash_ladder.loader import BUILD, build, build_simulator
from flash_ladder.nvcc import find_nvcc, nvcc_version
from flash_ladder.registry import find_stage, lineage, parent, read_stage, stages
from flash_ladder.sdpa import scaled_dot_product_attention
from flash_ladder.sources import ROOT, STAGES
from flash_ladder.stage import DTYPES, FIELDS, Available, Stage
from flash_ladder.varlen import attention_varlen

__all__ = ["BUILD", "DTYPES", "FIELDS", "MAX_HEAD_DIM", "ROOT", "STAGES", "Available", "Difference",
           "Explanation", "Report", "Stage", "__version__", "attention", "attention_kvcache",
           "attention_varlen", "build",
           "build_simulator", "can_inspect", "compile", "default_device", "definitions", "describe_device",
           "diff", "explain", "find_nvcc", "find_stage", "inspect", "lineage", "masks", "nvcc_version",
           "parent", "read_stage", "scaled_dot_product_attention", "shared_memory_per_block", "stages"]

if TYPE_CHECKING:
    from flash_ladder.difference import Difference, diff
    from flash_ladder.explain import Explanation, explain
    from flash_ladder.simulator.report import Report


def __getattr__(name: str):
    """What needs rich or the simulator's inspection is imported when it is used."""
    modules = {"Difference": "difference", "diff": "difference", "Explanation": "explain",
               "explain": "explain", "Report": "simulator.report"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"flash_ladder.{modules[name]}"), name)


if __name__ == "__main__":
    from flash_ladder import command

    sys.exit(command.main())
