"""Train GPT-2 or a Llama of Hugging Face's on this repository's sources, with an attention to choose.

    python examples/train_gpt.py                               # tiny, without a GPU in the simulator
    python examples/train_gpt.py --attention all --spread 3    # eager, PyTorch's SDPA and flash.attention
    python examples/train_gpt.py --size 124m --dtype bf16 --attention all --spread 3
    python examples/train_gpt.py --model llama --size 1b --dtype bf16 --attention flash

Tokens are bytes; the vocabularies are the models' own, as they matter for memory. The same seed gives the
same weights and the same batches, whatever the attention.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from gpt.comparison import plot, spread_of, table_of, verdict, write_json  # noqa: E402
from gpt.models import ATTENTIONS, SHAPES, shape_of  # noqa: E402
from gpt.training import BACKENDS, DTYPES, Result, Settings, train, try_to_train  # noqa: E402
from rich.console import Console  # noqa: E402

import flash  # noqa: E402


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    what = made.add_argument_group("what is trained")
    what.add_argument("--model", choices=list(SHAPES), default="gpt2")
    what.add_argument("--size", choices=["tiny", "124m", "1b"], default="tiny",
                      help="124m: GPT-2; 1b: Llama's")
    what.add_argument("--weights", type=Path, metavar="FOLDER",
                      help="begin with those that save_pretrained() wrote there; the shape is theirs")
    what.add_argument("--dropout", type=float, default=0.0, metavar="P", help="default: 0")
    what.add_argument("--dtype", choices=list(DTYPES), default="fp32", help="bf16: by torch.autocast")
    attention = made.add_argument_group("with which attention")
    attention.add_argument("--attention", choices=[*ATTENTIONS, "all"], default="flash",
                           help="eager and sdpa are Transformers' own; all: each, compared")
    attention.add_argument("--stage", help="flash: the forward stage (default: the best)")
    attention.add_argument("--backward", help="flash: the backward stage")
    attention.add_argument("--backend", choices=list(BACKENDS),
                           help="sdpa: PyTorch's (default: as it chooses)")
    attention.add_argument("--spread", type=int, default=1, metavar="N",
                           help="all: train eager with N seeds, to see how far apart they are (default: 1)")
    how = made.add_argument_group("how long, how fast")
    for name in ("steps", "batch", "seq-len"):
        how.add_argument(f"--{name}", type=int, metavar="N", help="default: by --size")
    how.add_argument("--lr", type=float, default=3e-4, metavar="X", help="default: 3e-4")
    how.add_argument("--seed", type=int, default=0, metavar="N")
    how.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True)")
    how.add_argument("--checkpointing", action="store_true", help="recompute each layer in the backward pass")
    kept = made.add_argument_group("what is kept")
    kept.add_argument("--out", type=Path, default=Path("build/train_gpt"), metavar="FOLDER",
                      help="of the figures, the curve and the checkpoints (default: build/train_gpt)")
    kept.add_argument("--save-every", type=int, default=0, metavar="N",
                      help="steps; 0, the default: no checkpoint")
    kept.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    return made


def settings_of(a: argparse.Namespace) -> tuple[Settings, int]:
    """And the number of steps. Raises ValueError for arguments that do not go together."""
    shape = shape_of(a.model, a.size)
    for name in ("steps", "batch", "seq_len"):
        if getattr(a, name) is None:
            setattr(a, name, getattr(shape, name))
    for name, least in (("steps", 1), ("batch", 1), ("seq_len", 2), ("spread", 1), ("save_every", 0)):
        if getattr(a, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(a, name)}")
    if not 0 <= a.dropout < 1:
        raise ValueError(f"--dropout must be at least 0 and below 1, not {a.dropout}")
    for name, attention in (("stage", "flash"), ("backward", "flash"), ("backend", "sdpa")):
        if getattr(a, name) is not None and a.attention not in (attention, "all"):
            raise ValueError(f"--{name} goes with --attention {attention} or all, not {a.attention}")
    if a.resume and a.attention == "all":
        raise ValueError("--resume goes on with one run: name its --attention")
    names = {field.name for field in dataclasses.fields(Settings)}
    return Settings(**{name: value for name, value in vars(a).items() if name in names}), a.steps


def main(arguments: list[str] | None = None) -> list[Result]:
    made = parser()
    a = made.parse_args(arguments)
    console = Console()
    try:
        settings, steps = settings_of(a)
        if a.attention != "all":
            results, spread = [one(settings, steps, a)], None
        else:
            results, spread = several(settings, steps, a)
    except ValueError as error:
        made.error(str(error))
    device = flash.describe_device(flash.default_device())
    title = f"{a.model} {a.size}, B={a.batch} T={a.seq_len}, {a.dtype}, {steps} steps"
    a.out.mkdir(parents=True, exist_ok=True)
    name = f"{a.model}_{a.size}_{a.dtype}_{a.attention}"
    write_json(a.out / f"{name}.json", settings, steps, device, results, spread)
    console.print(table_of(results, title))
    if said := verdict(results, spread):
        console.print(said)
    if any(each.losses for each in results):
        plot(a.out / f"{name}.png", results, title)
        console.print(f"{a.out / name}.json and .png; {device}")
    return results


def one(settings: Settings, steps: int, a: argparse.Namespace) -> Result:
    checkpoint = a.out / f"{settings.model}_{settings.size}_{settings.dtype}_{settings.attention}.pt"
    return train(settings, steps, checkpoint, a.save_every, a.resume)


def several(settings: Settings, steps: int, a: argparse.Namespace) -> tuple[list[Result], float | None]:
    """Each attention with the same seed; and the spread of eager's seeds."""
    each = [dataclasses.replace(settings, attention=attention) for attention in ATTENTIONS]
    others = [dataclasses.replace(each[0], seed=settings.seed + n) for n in range(1, a.spread)]
    results = [try_to_train(one, steps) for one in each]
    return results, spread_of([results[0], *(try_to_train(one, steps) for one in others)])


if __name__ == "__main__":
    torch.set_float32_matmul_precision("highest")
    main()
