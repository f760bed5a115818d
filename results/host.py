"""Host time of a call, from call to return: the whole, and its steps where the kernel does nothing.

    python results/host.py results/cpu      # writes host.json there; `make readme` makes docs/ from it

The Python side alone is the same with and without a GPU: the stage's library is replaced by a function that
returns at once. With a GPU the whole calls are timed too, with their launches, beside PyTorch's SDPA.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import flash  # noqa: E402
from flash_ladder import attention, launch, plan  # noqa: E402

SHAPE = (1, 4, 128, 64)  # B, H, N, d
CALLS, TURNS = 1000, 7


def microseconds(function: Callable[[], object]) -> float:
    """The fastest of a few turns, a call."""
    best = float("inf")
    for _ in range(TURNS):
        begun = time.perf_counter()
        for _ in range(CALLS):
            function()
        best = min(best, time.perf_counter() - begun)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return best / CALLS * 1e6


def steps(device: str, dtype: torch.dtype) -> list[dict]:
    """The Python side, step by step, and the whole without a kernel."""
    q, k, v, do = (torch.randn(SHAPE, device=device, dtype=dtype) for _ in range(4))
    leaf = q.clone().requires_grad_()

    def both():
        return torch.autograd.grad(flash.attention(leaf, k, v), leaf, do)

    flash.attention(q, k, v)
    both()
    for library in launch._libraries.values():
        library.run = lambda *_: None
    arguments = "causal", False, None, None, None, None, None, {}, 0.0, None, (None, None)
    key = attention._key(q, k, v, *arguments)
    call = attention._calls[key]
    o, lse = plan.forward_outputs(q, v)
    found = {
        "key of the call": lambda: attention._key(q, k, v, *arguments),
        "look it up, and whether its files are as they were": lambda: attention._calls[key].is_current(),
        "three addresses": lambda: (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16,
        "memory for O and L": lambda: plan.forward_outputs(q, v),
        "fill the parameter block, and launch nothing": lambda: call.plan.launch(q, k, v, o, lse),
        "copy of the parameter block, of that": lambda: (
            call.plan._words.from_buffer_copy(call.plan._template)),
        "forward call": lambda: flash.attention(q, k, v),
        "forward call, for gradients": lambda: flash.attention(leaf, k, v),
        "forward and backward": both,
    }
    return [{"step": name, "us": round(microseconds(function), 2)} for name, function in found.items()]


def whole(device: str, dtype: torch.dtype) -> list[dict]:
    """Calls with their launches, beside PyTorch's: without a stage's name, then by other ends of branches."""
    q, k, v, do = (torch.randn(SHAPE, device=device, dtype=dtype) for _ in range(4))
    leaf = q.clone().requires_grad_()
    taken = flash.find_stage(None, dtype, torch.device(device))
    calls = {f"flash.attention, which takes {taken.name}": flash.attention}
    for s in flash.stages("fwd"):
        if s.default and not s.calls and s != taken and dtype in s.dtypes and s.available(device, dtype):
            calls[f"flash.attention, {s.name}"] = functools.partial(flash.attention, stage=s.name)
    rows = []
    for name, function in (calls | {
            "PyTorch's SDPA": torch.nn.functional.scaled_dot_product_attention}).items():
        def both(function=function):
            return torch.autograd.grad(function(leaf, k, v), leaf, do)
        both()
        rows.append({"call": name, "forward_us": microseconds(lambda f=function: f(q, k, v)),
                     "forward_backward_us": microseconds(both)})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where host.json goes")
    args = parser.parse_args()
    device = flash.default_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    data = {"device": flash.describe_device(device), "date": date.today().isoformat(), "shape": SHAPE,
            "dtype": str(dtype).removeprefix("torch.")}
    if device.type == "cuda":  # before the libraries are replaced
        data["calls"] = whole(device.type, dtype)
    data["steps"] = steps(device.type, dtype)
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "host.json").write_text(json.dumps(data, indent=1) + "\n")
    for row in data.get("calls", []):
        print(f"{row['call']}: {row['forward_us']:.1f} us forward, "
              f"{row['forward_backward_us']:.1f} us forward and backward")
    for row in data["steps"]:
        print(f"{row['us']:8.2f} us  {row['step']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
