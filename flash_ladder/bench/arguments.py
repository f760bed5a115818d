"""The command line of bench.py: what is asked for, checked."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import torch

import flash

from .choosing import choose_peers, choose_stages
from .competitors import PEERS, why_not
from .decode import MOST_QUERIES, PAGE, QUERIES
from .decode import PEERS as DECODE_PEERS
from .masked import BLOCKS, SYNTAX, pattern
from .peers import PEERS as MASK_PEERS
from .report import PASSES, lengths
from .rung_cases import with_cases
from .timeline import check_stages, has_marks
from .varlen import PEERS as VARLEN_PEERS
from .varlen import SEQUENCES

DEFAULTS: dict[str, tuple] = {  # on a GPU, on the CPU
    "seqlens": ([512, 1024, 2048, 4096], [64, 128, 256]), "batch": (4, 1), "heads": ("12", "2"),
    "head_dim": (64, 64), "causal": (True, True), "dtype": ("fp32", "fp32"),
    "peers": (",".join(PEERS), "math")}
DECODE_DEFAULTS: dict[str, tuple] = {
    "queries": (QUERIES["cuda"], QUERIES["cpu"]), "seqlens": ([8192], [512]), "batch": (8, 1),
    "heads": ("32:8", "4:2"), "head_dim": (128, 64), "dtype": ("bf16", "bf16"),
    "peers": (",".join(DECODE_PEERS), "sdpa")}
TIMELINE_DEFAULTS: dict[str, tuple] = {
    "seqlens": ([4096], [512]), "batch": (4, 1), "heads": ("12", "2"), "head_dim": (128, 128),
    "causal": (False, False), "dtype": ("bf16", "bf16")}
# For options that are not given. vla: blocks as in a vision-language-action model (Black et al., arXiv
# 2410.24164)
PRESETS: dict[str, dict] = {
    "vla": {"mask": f"block_causal:{BLOCKS}", "batch": 2, "heads": "8:1", "head_dim": 256, "dtype": "bf16",
            "seqlens": [1024]}}


def positive_integers(text: str) -> list[int]:
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; it takes integers of at least 1, such as 512,1024")
    return list(dict.fromkeys(numbers))


def described(preset: dict) -> str:
    return " ".join(f"--{name.replace('_', '-')} {','.join(map(str, x)) if isinstance(x, list) else x}"
                    for name, x in preset.items())


def passes(text: str) -> list[str]:
    asked = text.split(",")
    if unknown := [name for name in asked if name not in (*PASSES, "all")]:
        raise argparse.ArgumentTypeError(f"no pass {unknown[0]!r}; there are {', '.join(PASSES)}, and all")
    return list(PASSES) if "all" in asked else list(dict.fromkeys(asked))


def parse_arguments(argv: list[str] | None = None) -> list[argparse.Namespace]:
    """The arguments for each pass, checked: what cannot run is refused here, before anything is built (exit
    status 2)."""
    module = Path(sys.argv[0]).name == "__main__.py"
    parser = argparse.ArgumentParser(
        "python -m flash_ladder.bench" if module else None,
        description="Compares the stages with one another and with PyTorch's own attention: a table, plots "
                    "and JSON.")
    add = parser.add_argument
    add("--pass", dest="passes", metavar="A,B", type=passes,
        help=f"of {', '.join(PASSES)}, or all; each has its own table and files; default: fwd, with --rungs "
             "fwd,bwd. bwd: the gradients alone, after the best forward stage. fwd+bwd: each backward stage "
             "with the forward stage of its name or, if there is none, with the parent of the next namesake "
             "on its branch (recompute: flash2)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stages", metavar="A,B",
                      help="by name (python flash.py lists them) or a .cuh file, for bwd and fwd+bwd of the "
                           "backward pass; each of several passes takes those it knows; default: all that "
                           "run here")
    what.add_argument("--inspect", metavar="STAGE",
                      help="time nothing: run this stage, a name or a .cuh file, once in the simulator, and "
                           "report every access to memory, and what is wrong with any; with --pass bwd, a "
                           "stage of the backward pass")
    what.add_argument("--sweep", metavar="STAGE",
                      help="time this stage, a name or a .cuh file, with all tile sizes that it takes here: "
                           "a table with the best first, and a picture; the header's tiles come from this")
    add("--rungs", action="store_true",
        help="time all stages, or --stages, by turns at a few shapes, and draw TFLOP/s by rung. Without a "
             "GPU: HBM traffic and wavefronts of shared memory by rung, counted")
    add("--varlen", action="store_true",
        help=f"attention_varlen() for {SEQUENCES} sequences of mixed lengths, beside attention() for one "
             f"shape with as much work, and peers: {', '.join(VARLEN_PEERS)}; --pass fwd or bwd")
    add("--decode", action="store_true",
        help="decode steps: a few queries (--queries) over caches of --seqlens keys, also in pages, beside "
             f"peers: {', '.join(DECODE_PEERS)}")
    add("--timeline", action="store_true",
        help="draw what the warps of a block do side by side: copies, products, softmax, waits; of --stages, "
             "from tma on; default: all of them; with --pass bwd those of the backward pass. On a GPU by its "
             "own clock; in the simulator by a model")
    add("--queries", metavar="N,N", type=positive_integers,
        help=f"with --decode: of a sequence, up to {MOST_QUERIES}; default: "
             f"{','.join(map(str, QUERIES['cuda']))}, or {','.join(map(str, QUERIES['cpu']))} on CPU")
    add("--line", metavar="FILE:LINE",
        help="with --inspect: also draw which lane of a warp touches which bank or sector at this line")
    what.add_argument("--markdown", metavar="JSON", type=Path,
                      help="measure nothing: print this result as a table")
    add("--seqlens", metavar="N,N", type=positive_integers,
        help="default: 512 to 4096, or 64 to 256 on CPU; with --inspect, 128; with --sweep, the largest")
    add("--batch", metavar="B", type=int, help="default: 4, or 1 on CPU")
    add("--heads", metavar="H[:H_kv]", help="of Q, and of K and V if fewer; default: 12, or 2 on CPU")
    add("--head-dim", metavar="d", type=int, help=f"a multiple of 8, to {flash.MAX_HEAD_DIM}; default: 64")
    add("--causal", action=argparse.BooleanOptionalAction, help="default: --causal, or no mask but --mask")
    add("--mask", metavar="NAME:NUMBER&...",
        help="one of flash.masks, or several: " + ", ".join(name + how for name, (how, *_) in SYNTAX.items())
             + ". document, block_causal: COUNT of random lengths; padding, boolean, bias: random. Peers: "
             + ", ".join(MASK_PEERS) + ": flex_attention compiled, SDPA with a dense mask, plain code")
    add("--checkpoint", action="store_true", default=None,
        help="with --pass fwd+bwd: under torch.utils.checkpoint, so that the forward pass keeps nothing")
    add("--preset", choices=PRESETS, help="a shape and a mask, for options that are not given: " + "; ".join(
        f"{name}: {described(preset)}" for name, preset in PRESETS.items()))
    add("--dtype", help=f"of {', '.join(flash.DTYPES)}; default: fp32, with --rungs fp32 and bf16")
    add("--peers", metavar="A,B", help=f"PyTorch's backends, of {', '.join(PEERS)}, or none; those that "
                                       "refuse are left out; default: all, or math on CPU. For --mask, "
                                       "see there")
    add("--out", metavar="FOLDER", type=Path, default=flash.BUILD / "bench",
        help="default: bench/ in the build folder")
    args = parser.parse_args(argv)
    args.device = torch.device("cpu") if args.inspect else flash.default_device()
    try:
        if args.markdown and not args.rungs:
            read_result(args)
            return [args]
        set_defaults(args)
        if args.rungs:
            each = [with_cases(args)]
        elif args.varlen:
            check_shape(args)
            args.peers = choose_peers(args.peers, "varlen")
            args.direction, args.stages = ",".join(args.passes), []
            each = [args]
        elif args.decode:
            check_shape(args)
            check_decode(args)
            args.peers = choose_peers(args.peers, "decode")
            args.direction, args.stages = "fwd", []
            each = [args]
        elif args.timeline:
            check_shape(args)
            each = [for_timeline(args)]
        else:
            check_shape(args)
            args.peers = choose_peers(args.peers, "mask" if args.mask else "")
            each = [for_pass(direction, args) for direction in args.passes]
        args.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    return each


def set_defaults(args: argparse.Namespace) -> None:
    """Set what is not given and depends on the device; check what goes together."""
    if args.line and not args.inspect:
        raise ValueError("--line: goes with --inspect")
    for other in ("rungs", "varlen", "decode"):
        if args.timeline and getattr(args, other):
            raise ValueError(f"--timeline: draws calls of attention(), and takes no --{other}")
    if args.rungs:
        options = ("inspect", "sweep", "markdown", "seqlens", "batch", "heads", "head_dim", "causal",
                   "mask", "checkpoint", "preset")
        if given := [name for name in options if getattr(args, name) is not None]:
            option = given[0].replace("_", "-")
            raise ValueError(f"--rungs: has shapes of its own, and takes no --{option}")
        if "fwd+bwd" in (args.passes or ()):
            raise ValueError("--rungs: draws each pass alone: --pass fwd, bwd or fwd,bwd")
        args.passes = args.passes or ["fwd", "bwd"]
        return
    if args.varlen:
        others = ("inspect", "sweep", "stages", "seqlens", "batch", "mask", "checkpoint", "preset")
        if given := [name for name in others if getattr(args, name) is not None]:
            raise ValueError(f"--varlen: has lengths and stages of its own, and takes no --{given[0]}")
        if "fwd+bwd" in (args.passes or ()):
            raise ValueError("--varlen: times each pass alone: --pass fwd, bwd or fwd,bwd")
        args.dtype, args.peers = args.dtype or "bf16", args.peers or ",".join(VARLEN_PEERS)
        args.heads = args.heads or ("16" if args.device.type == "cuda" else "2")
    if args.queries and not args.decode:
        raise ValueError("--queries: goes with --decode")
    if args.decode:
        others = ("passes", "inspect", "sweep", "stages", "causal", "mask", "checkpoint", "preset")
        if given := [name for name in others if getattr(args, name) is not None] + ["varlen"] * args.varlen:
            option = "pass" if given[0] == "passes" else given[0]
            raise ValueError(f"--decode: times forward calls that see all keys, and takes no --{option}")
        for name, (on_gpu, on_cpu) in DECODE_DEFAULTS.items():
            if getattr(args, name) is None:
                setattr(args, name, on_gpu if args.device.type == "cuda" else on_cpu)
        args.causal = False
    if args.timeline:
        set_timeline_defaults(args)
    args.passes = args.passes or ["fwd"]
    if args.checkpoint and args.passes != ["fwd+bwd"]:
        raise ValueError("--checkpoint: goes with --pass fwd+bwd")
    for name, value in PRESETS.get(args.preset, {}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.mask:
        if args.causal:
            raise ValueError(f"--mask: takes no --causal beside it; causal&{args.mask} is both")
        args.causal = False
        args.peers = args.peers or ",".join(MASK_PEERS)
    if args.inspect:
        if not (possible := flash.can_inspect()):
            raise ValueError(f"--inspect: {possible}")
        if args.passes not in (["fwd"], ["bwd"]):
            raise ValueError("--inspect: takes one pass: --pass fwd, the default, or --pass bwd")
        args.seqlens = args.seqlens or [128]
    if args.sweep:
        if len(args.passes) > 1:
            raise ValueError(f"--sweep: takes one pass; --pass has {', '.join(args.passes)}")
        args.seqlens = args.seqlens or DEFAULTS["seqlens"][args.device.type == "cpu"][-1:]
    for option in ("inspect", "sweep"):
        if getattr(args, option) and len(args.seqlens) > 1:
            raise ValueError(f"--{option}: takes one N; --seqlens has {', '.join(map(str, args.seqlens))}")
    for name, (on_gpu, on_cpu) in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, on_gpu if args.device.type == "cuda" else on_cpu)


def set_timeline_defaults(args: argparse.Namespace) -> None:
    others = ("inspect", "sweep", "mask", "checkpoint", "preset", "peers")
    if given := [name for name in others if getattr(args, name) is not None]:
        raise ValueError(f"--timeline: measures nothing beside it, and takes no --{given[0]}")
    if args.passes not in (None, ["fwd"], ["bwd"]):
        raise ValueError("--timeline: takes one pass: --pass fwd, the default, or --pass bwd")
    if args.seqlens and len(args.seqlens) > 1:
        raise ValueError(f"--timeline: takes one N; --seqlens has {', '.join(map(str, args.seqlens))}")
    for name, (on_gpu, on_cpu) in TIMELINE_DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, on_gpu if args.device.type == "cuda" else on_cpu)


def for_timeline(args: argparse.Namespace) -> argparse.Namespace:
    """With the stages that leave marks, or those that are asked for."""
    asked, direction = (args.stages or "").split(","), args.passes[0]
    check_stages([stage for stage in flash.stages(direction) if stage.name in asked])   # of any type
    args = for_pass(direction, args)
    if asked != [""]:
        check_stages(args.stages)
    args.stages = [stage for stage in args.stages if has_marks(stage)]
    if not args.stages:
        raise ValueError(f"--timeline: no stage that leaves marks takes {args.dtype} here: they need sm_90, "
                         "and bf16 or fp16")
    return args


def read_result(args: argparse.Namespace) -> None:
    """Set `args.data`, and `args.seqlens` to its last N if none is asked for."""
    try:
        args.data = json.loads(args.markdown.read_text())
        there = lengths(args.data)
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"--markdown: {args.markdown} is no result of bench.py") from None
    args.seqlens = args.seqlens or there[-1:]
    if missing := set(args.seqlens) - set(there):
        raise ValueError(f"--seqlens: no N={min(missing)} in the result; it has {', '.join(map(str, there))}")


def check_shape(args: argparse.Namespace) -> None:
    """Check the type and the shape but for N; set `args.H` and `args.H_kv`."""
    if args.dtype not in flash.DTYPES:
        raise ValueError(f"--dtype: no stage takes {args.dtype!r}; they take {', '.join(flash.DTYPES)}")
    if args.head_dim % 8 or not 8 <= args.head_dim <= flash.MAX_HEAD_DIM:
        raise ValueError(f"--head-dim: {args.head_dim}; d must be a multiple of 8 up to {flash.MAX_HEAD_DIM}")
    if args.batch < 1:
        raise ValueError(f"--batch: {args.batch}; B must be at least 1")
    heads = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", args.heads)
    if not heads or int(heads[1]) % int(heads[2] or 1):
        raise ValueError(f"--heads: {args.heads!r}; H or H:H_kv, H a multiple of H_kv, such as 12 or 8:2")
    args.H, args.H_kv = int(heads[1]), int(heads[2] or heads[1])
    if args.mask:
        try:
            pattern(8, argparse.Namespace(**vars(args) | {"device": torch.device("cpu")})).joined()
        except ValueError as error:
            raise ValueError(f"--mask: {str(error).removeprefix('mask: ')}") from None


def check_decode(args: argparse.Namespace) -> None:
    if args.dtype == "fp32":
        raise ValueError("--decode: caches are of 16-bit types: --dtype bf16 or fp16")
    if most := max(args.queries) > MOST_QUERIES and max(args.queries):
        raise ValueError(f"--queries: {most}; a decode step has up to {MOST_QUERIES}")
    if ragged := [N for N in args.seqlens if N % PAGE]:
        raise ValueError(f"--seqlens: {ragged[0]}; with --decode a multiple of {PAGE}, for the pages")


def for_pass(direction: str, args: argparse.Namespace) -> argparse.Namespace:
    """The arguments for one of the passes, with its stages."""
    args = argparse.Namespace(**vars(args) | {"direction": direction, "not_run": {}})
    args.stages = choose_stages(args)
    if direction != "fwd" and all(why_not(stage, args) for stage in flash.stages("fwd")):
        raise ValueError(f"--pass {direction}: no forward stage runs here; python flash.py says why")
    return args
