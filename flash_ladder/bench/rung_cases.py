"""What bench.py --rungs measures: passes, types and shapes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import flash

from .choosing import choose_peers, own_stages, stages_of
from .competitors import why_not

# (B, H, N, d), each with and without a mask; in 16 bits H d is 2048, as in a model
SHAPES_FP32 = ((4, 12, 1024, 64), (4, 12, 4096, 64), (4, 12, 4096, 128))
SHAPES_16 = ((4, 32, 4096, 64), (4, 16, 4096, 128), (4, 8, 4096, 256))
SHAPE_COUNTED = (1, 2, 256, 64)      # in the simulator, causal
PEERS_FP32, PEERS_16 = "efficient,math", "flash,cudnn"
DTYPES = "fp32,bf16"


def with_cases(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with `args.cases`: bench.py's arguments for each pass, type and shape, with their stages.

    Raises:
        ValueError: if a stage or a type is asked for that does not exist, or nothing is left to run.
    """
    asked = args.stages.split(",") if args.stages else []
    own = own_stages(asked, "--stages", args)
    types = args.dtype.split(",") if args.dtype else DTYPES.split(",")
    if unknown := set(types) - set(flash.DTYPES):
        raise ValueError(f"--dtype: no stage takes {min(unknown)!r}; they take {', '.join(flash.DTYPES)}")
    args.cases, args.not_run = [], {}
    found: dict[str, flash.Stage] = {}
    for direction in args.passes:
        for dtype in types:
            one = argparse.Namespace(**vars(args) | {"direction": direction, "dtype": dtype})
            known = stages_of(direction, one)
            known |= {text: stage for text, stage in own.items()
                      if stage.direction == direction and flash.DTYPES[dtype] in stage.dtypes}
            chosen = {name: stage for name, stage in known.items() if not asked or name in asked}
            found |= chosen
            for case in cases_of(one):
                set_stages(case, list(chosen.values()))
                note_not_run(case, args.not_run)
                args.cases += [case] if case.stages else []
    if missing := [name for name in asked if name not in found]:
        raise ValueError(f"--stages: no stage {missing[0]!r} for {' or '.join(types)} in the pass "
                         f"{' or '.join(args.passes)}")
    if not args.cases:
        raise ValueError("--rungs: no stage runs here; python flash.py says why")
    return args


def cases_of(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """The arguments for each shape of a pass and a type; no stages yet."""
    narrow = args.dtype != "fp32"
    peers = choose_peers(args.peers or (PEERS_16 if narrow else PEERS_FP32))
    shapes: tuple = SHAPES_16 if narrow else SHAPES_FP32
    if args.device.type == "cpu":
        shapes, peers = (SHAPE_COUNTED,), []
    for B, H, N, d in shapes:
        for causal in (True, False) if args.device.type == "cuda" else (True,):
            yield argparse.Namespace(**vars(args) | {
                "batch": B, "H": H, "H_kv": H, "head_dim": d, "causal": causal, "seqlens": [N],
                "peers": peers, "not_run": {}})


def set_stages(args: argparse.Namespace, stages: list[flash.Stage]) -> None:
    """Set `args.stages` to those that run here; why others do not goes into `args.not_run`."""
    reasons = {stage.name: why_not(stage, args) for stage in stages}
    args.stages = [stage for stage in stages if not reasons[stage.name]]
    args.not_run = {name: reason for name, reason in reasons.items() if reason}


def note_not_run(args: argparse.Namespace, found: dict[str, str]) -> None:
    """Note the stages and peers that do not run at a shape, and why: of several shapes, the first reason."""
    for name, reason in args.not_run.items():
        found.setdefault(f"{name}, {args.direction} {args.dtype}", reason)
