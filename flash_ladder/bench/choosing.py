"""Which stages and peers bench.py compares: what is asked for, checked."""

from __future__ import annotations

import argparse
from pathlib import Path

import flash

from .competitors import PEERS, why_not
from .decode import PEERS as DECODE_PEERS
from .peers import PEERS as MASK_PEERS
from .report import PASSES
from .varlen import PEERS as VARLEN_PEERS


def stages_of(direction: str, args: argparse.Namespace) -> dict[str, flash.Stage]:
    """By name, the stages that a pass compares and that take the type."""
    return {stage.name: stage for stage in flash.stages(kind(direction))
            if flash.DTYPES[args.dtype] in stage.dtypes}


def choose_stages(args: argparse.Namespace) -> list[flash.Stage]:
    """The stages to run, in the ladder's order. One that cannot run goes into `args.not_run`, or, if it was
    asked for, is an error."""
    option = "--inspect" if args.inspect else "--sweep" if args.sweep else "--stages"
    one = args.inspect or args.sweep
    asked = [one] if one else args.stages.split(",") if args.stages else []
    own = own_stages(asked, option, args)
    known = stages_of(args.direction, args)
    known |= {text: stage for text, stage in own.items() if stage.direction == kind(args.direction)}
    elsewhere = {name for direction in args.passes for name in stages_of(direction, args)}
    elsewhere |= {text for text, stage in own.items() if stage.direction in map(kind, args.passes)}
    missing = [name for name in asked if name not in known]
    if unknown := [name for name in missing if missing == asked or name not in elsewhere]:
        if unknown[0] not in own:
            raise ValueError(f"{option}: {no_stage(unknown[0], args)}")
        if unknown[0] in elsewhere:
            raise ValueError(f"{option}: --pass {args.direction} has none of {', '.join(asked)}")
        raise ValueError(f"{option}: {unknown[0]} is {a_stage_of(own[unknown[0]].direction)}")
    chosen = [name for name in known if name in asked] if asked else list(known)
    reasons = {name: reason for name in chosen if (reason := why_not(known[name], args))}
    if reasons and (asked or len(reasons) == len(chosen)):
        raise ValueError("{}: {}: {}".format(option, *next(iter(reasons.items()))))
    args.not_run |= reasons
    able = (known[name] for name in chosen if name not in reasons)
    return list({(stage.path, stage.name): stage for stage in able}.values())  # by path and by name: once


def kind(direction: str) -> str:
    """Of the stages that a pass compares: "fwd" or "bwd"."""
    return "fwd" if direction == "fwd" else "bwd"


def own_stages(asked: list[str], option: str, args: argparse.Namespace) -> dict[str, flash.Stage]:
    """Those of `asked` that are paths: they end in .cuh, or have a slash. If the file's first line does not
    say for which pass it is, its parameters do."""
    found: dict[str, flash.Stage] = {}
    for text in asked:
        if not text.endswith(".cuh") and "/" not in text:
            continue
        path = Path(text)
        if not path.is_file():
            raise ValueError(f"{option}: there is no file {text}")
        code = path.read_text(errors="replace")
        named = [which for which in ("fwd", "bwd") if f"{which.capitalize()}Params" in code]
        stage = flash.read_stage(path, (named or [kind(args.passes[0])])[0])
        if any(other.path.name == path.name and other != stage for other in found.values()):
            raise ValueError(f"{option}: two files are called {path.name}: give one of them another name")
        found[text] = stage
    return found


def a_stage_of(direction: str) -> str:
    """For an error: what a stage is, and which option takes it."""
    return f"a {PASSES[direction]} stage: add --pass {direction}"


def no_stage(name: str, args: argparse.Namespace) -> str:
    """For an error: that the pass, or each of several, has no such stage, and which there are."""
    there = {which: stages_of(which, args) for which in ("fwd", "bwd")}
    here = kind(args.direction)
    asked = set(map(kind, args.passes))
    if len(asked) == 2 and not any(name in stages for stages in there.values()):
        names = "; ".join(f"{PASSES[which]}: {', '.join(stages)}" for which, stages in there.items())
        return f"no stage {name!r} for {args.dtype} in any of the passes; there are {names}"
    text = f"no {PASSES[here]} stage {name!r} for {args.dtype}; there are {', '.join(there[here])}"
    other = "bwd" if here == "fwd" else "fwd"
    text += f"; it is {a_stage_of(other)}" * (len(asked) == 1 and name in there[other])
    types = [word for stage in flash.stages(here) if stage.name == name
             for word, dtype in flash.DTYPES.items() if dtype in stage.dtypes]
    return text + (f"; it takes {', '.join(types)}: add --dtype {types[-1]}" if types else "")


def choose_peers(text: str, option: str = "") -> list[str]:
    """option: another one that has peers of its own."""
    where = f"with --{option} there are" if option else "there are"
    known = {"mask": MASK_PEERS, "varlen": VARLEN_PEERS, "decode": DECODE_PEERS, "": PEERS}[option]
    peers = [] if text == "none" else list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in peers if name not in known]:
        raise ValueError(f"--peers: there is no {unknown[0]!r}; {where} {', '.join(known)}, or none")
    return peers
