"""Models trained with an attention to choose, by examples/train_gpt.py: its results, for docs/use.md.

    python examples/train_gpt.py --size 124m --dtype bf16 --attention all --backend flash --out FOLDER
    python results/models.py results/h200              # beside SDPA's backends: writes backends.json there

The first one's JSON goes to results/h200/models/, and `make readme` makes a table of what lies there. In its
folder compiled/ are pairs of runs with --attention flash, one of them with --compile: NAME.json and
NAME_compiled.json.
"""

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

NAMES = {"eager": "eager", "sdpa": "SDPA", "flash": "flash.attention"}
BACKENDS = (None, "flash", "cudnn", None)          # of SDPA; None: flash.attention, first and last
# Of both models a short row and a long one: model, size, B, T, steps
RUNS = (("gpt2", "124m", 8, 1024, 40), ("gpt2", "124m", 2, 4096, 40),
        ("llama", "1b", 4, 1024, 24), ("llama", "1b", 1, 4096, 24))


def table(folder: Path) -> str:
    """A line for each model and attention."""
    lines = ["| model | attention | final loss | to eager | tokens/s | peak memory | saved |",
             "|---|---|---:|---:|---:|---:|---:|"]
    devices, spreads = {}, []
    for file in sorted(folder.glob("*.json")):
        data = json.loads(file.read_text())
        devices[data["device"]] = None
        run = data["settings"]
        what = (f"{run['model']} {run['size']}, B={run['batch']} T={run['seq_len']}, {run['dtype']}, "
                f"{run['steps']} steps")
        if data["spread_percent"] is not None:
            spreads.append(f"{what}: {data['spread_percent']:.2f} %")
        eager = next(row for row in data["results"] if row["attention"] == "eager")
        for row in data["results"]:
            name = NAMES[row["attention"]] + f", {run['backend']}" * (row["attention"] == "sdpa")
            apart = "-" if row is eager else f"{row['to_eager_percent']:+.3f} %"
            saved = "-" if row is eager else f"{100 * (1 - row['peak'] / eager['peak']):.1f} %"
            cells = (what if row is eager else "", name, f"{row['final_loss']:.4f}", apart,
                     f"{row['tokens_per_s']:,.0f}", f"{row['peak'] / 2**30:.2f} GiB", saved)
            lines.append(f"| {' | '.join(cells)} |")
    origin = (f"{' and '.join(devices)}, by `examples/train_gpt.py --attention all`. Final loss: the mean "
              "over the last tenth of the steps. Three seeds of eager's are apart by: "
              f"{'; '.join(spreads)}.")
    return "\n".join([*lines, "", origin, *compiled(folder / "compiled")])


def compiled(folder: Path) -> list[str]:
    """A paragraph about torch.compile, if there are runs with it."""
    pairs = []
    for file in sorted(folder.glob("*_compiled.json")):
        with_it, without = (json.loads(each.read_text()) for each in (
            file, file.with_name(file.name.replace("_compiled", ""))))
        run, losses = with_it["settings"], [x["results"][0]["losses"] for x in (with_it, without)]
        apart = max(abs(x / y - 1) for x, y in zip(*losses, strict=True))
        final = [x["results"][0]["final_loss"] for x in (with_it, without)]
        pairs.append(f"{run['model']} {run['size']}, {run['dtype']}, {run['steps']} steps: final loss "
                     f"{final[0]:.4f}, {final[1]:.4f} without; no step's is further apart than "
                     f"{100 * apart:.3f} %")
    what = "With `--compile`, torch.compile(fullgraph=True), which allows no graph break"
    return [f"\n{what}: {'; '.join(pairs)}."] if pairs else []


def backends(file: Path) -> str:
    """A line for each model: tokens/s, and peak memory."""
    data, by_run = json.loads(file.read_text()), {}
    for row in data["rows"]:
        what = f"{row['model']} {row['size']}, B={row['B']} T={row['T']}"
        by_run.setdefault(what, {}).setdefault(row["backend"], []).append(row)
    lines = ["| model, bf16 | flash.attention, first and last | SDPA, flash | SDPA, cuDNN | of the best | "
             "peak memory, of SDPA's |", "|---|---:|---:|---:|---:|---:|"]
    for what, rows in by_run.items():
        speed = {name: [row["tokens_per_s"] for row in each] for name, each in rows.items()}
        peak = {name: max(row["peak"] for row in each) for name, each in rows.items()}
        ours, best = speed[None], max(speed["flash"] + speed["cudnn"])
        lines.append(f"| {what} | {' and '.join(f'{x:,.0f}' for x in ours)} | {speed['flash'][0]:,.0f} | "
                     f"{speed['cudnn'][0]:,.0f} | {sum(ours) / len(ours) / best:.3f} | "
                     f"{peak[None] / peak['flash']:.4f} |")
    loss = max(abs(row["loss"] / rows["flash"][0]["loss"] - 1)
               for rows in by_run.values() for each in rows.values() for row in each)
    again = max(abs(rows[None][0]["loss"] / rows[None][-1]["loss"] - 1) for rows in by_run.values())
    origin = f"{data['device']}; {data['date']}, by `python results/models.py`"
    return "\n".join([
        *lines, "",
        f"Tokens/s. {origin}: {RUNS[0][4]} steps of gpt2, {RUNS[-1][4]} of llama. No final loss is further "
        f"than {100 * loss:.2f} % from that with SDPA's flash backend; our two are apart by up to "
        f"{100 * again:.2f} %."])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    if not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    import ratios
    import torch
    from gpt.training import Settings, try_to_train

    import flash

    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    data = {"device": flash.describe_device(torch.device("cuda", torch.cuda.current_device())),
            "date": time.strftime("%Y-%m-%d"), "rows": []}
    for model, size, B, T, steps in RUNS:
        for backend in BACKENDS:
            settings = Settings(model, size, "sdpa" if backend else "flash", B, T, dtype="bf16",
                                backend=backend)
            done = try_to_train(settings, steps)
            if done.error:
                sys.exit(f"{model} {size}, {backend or 'flash.attention'}: {done.error}")
            data["rows"].append({"model": model, "size": size, "B": B, "T": T, "steps": steps,
                                 "backend": backend, "tokens_per_s": done.tokens_per_s, "peak": done.peak,
                                 "loss": done.final_loss})
            ratios.write(data, args.folder / "backends.json")
            print(f"{model} {size}, B={B} T={T}, {backend or 'flash.attention'}: "
                  f"{done.tokens_per_s:,.0f} tokens/s", flush=True)
    print(backends(args.folder / "backends.json"))


if __name__ == "__main__":
    main()
