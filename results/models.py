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
LABELS = {None: "flash.attention", "flash": "SDPA, flash", "cudnn": "SDPA, cuDNN", "math": "SDPA, math"}
# Of both models a short row and a long one: model, size, B, T, steps
RUNS = (("gpt2", "124m", 8, 1024, 40), ("gpt2", "124m", 2, 4096, 40),
        ("llama", "1b", 4, 1024, 24), ("llama", "1b", 1, 4096, 24))


def table(folder: Path) -> str:
    """A line for each model and attention."""
    lines = ["| model | attention | final loss | to eager | tokens/s | peak memory | saved |",
             "|---|---|---:|---:|---:|---:|---:|"]
    origins, stages, spreads = {}, {}, []
    for file in sorted(folder.glob("*.json")):
        data = json.loads(file.read_text())
        origins[f"{data['device']}; {data['date']}"] = None
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
            stages |= {f"{run['dtype']}, {taken(row)}": None} if row["stages"] else {}
    origin = (f"{' and '.join(origins)}, by `examples/train_gpt.py --attention all`. flash.attention took: "
              f"{'; '.join(stages)}. Final loss: the mean over the last tenth of the steps. Three seeds of "
              f"eager's are apart by: {'; '.join(spreads)}.")
    return "\n".join([*lines, "", origin, *compiled(folder / "compiled")])


def taken(row: dict) -> str:
    """The stages of a row with flash.attention."""
    return " and ".join(dict.fromkeys(row["stages"].values()))


def compiled(folder: Path) -> list[str]:
    """A paragraph about torch.compile, if there are runs with it."""
    pairs, origins = [], {}
    for file in sorted(folder.glob("*_compiled.json")):
        with_it, without = (json.loads(each.read_text()) for each in (
            file, file.with_name(file.name.replace("_compiled", ""))))
        run, losses = with_it["settings"], [x["results"][0]["losses"] for x in (with_it, without)]
        origins[f"{with_it['date']}, {taken(with_it['results'][0])}"] = None
        apart = max(abs(x / y - 1) for x, y in zip(*losses, strict=True))
        final = [x["results"][0]["final_loss"] for x in (with_it, without)]
        pairs.append(f"{run['model']} {run['size']}, {run['dtype']}, {run['steps']} steps: final loss "
                     f"{final[0]:.4f}, {final[1]:.4f} without; no step's is further apart than "
                     f"{100 * apart:.3f} %")
    what = "With `--compile`, torch.compile(fullgraph=True), which allows no graph break"
    return [f"\n{what} ({'; '.join(origins)}): {'; '.join(pairs)}."] if pairs else []


def measure(data: dict, file: Path) -> None:
    """RUNS with each of BACKENDS, into `data` and the file. Exits if one cannot run."""
    import ratios
    from gpt.training import Settings, try_to_train

    for model, size, B, T, steps in RUNS:
        for backend in BACKENDS:
            attention = "sdpa" if backend else "flash"
            done = try_to_train(Settings(model, size, attention, B, T, dtype="bf16", backend=backend), steps)
            what = f"{model} {size}, B={B} T={T}, {LABELS[backend]}"
            if done.error:
                sys.exit(f"{what}: {done.error}")
            data["rows"].append({"model": model, "size": size, "B": B, "T": T, "steps": steps,
                                 "backend": backend, "tokens_per_s": done.tokens_per_s, "peak": done.peak,
                                 "loss": done.final_loss, "stages": done.stages})
            ratios.write(data, file)
            print(f"{what}: {done.tokens_per_s:,.0f} tokens/s", flush=True)


def backends(file: Path) -> str:
    """A line for each model: tokens/s, and peak memory."""
    data, by_run = json.loads(file.read_text()), {}
    for row in data["rows"]:
        what = f"{row['model']} {row['size']}, B={row['B']} T={row['T']}"
        by_run.setdefault(what, {}).setdefault(row["backend"], []).append(row)
    theirs = [name for name in dict.fromkeys(BACKENDS) if name]
    heads = ["model, bf16", f"{LABELS[None]}, first and last", *(LABELS[name] for name in theirs),
             "of the best", "peak memory, of SDPA's"]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for what, rows in by_run.items():
        speed = {name: [row["tokens_per_s"] for row in each] for name, each in rows.items()}
        peaks = [max(row["peak"] or 0 for row in rows[name]) for name in (None, theirs[0])]
        ours, best = speed[None], max(x for name in theirs for x in speed[name])
        cells = [what, " and ".join(f"{x:,.0f}" for x in ours),
                 *(f"{speed[name][0]:,.0f}" for name in theirs),
                 f"{sum(ours) / len(ours) / best:.3f}", f"{peaks[0] / peaks[1]:.4f}" if all(peaks) else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    base = {what: rows[theirs[0]][0]["loss"] for what, rows in by_run.items()}
    loss = max(abs(row["loss"] / base[what] - 1)
               for what, rows in by_run.items() for each in rows.values() for row in each)
    again = max(abs(rows[None][0]["loss"] / rows[None][-1]["loss"] - 1) for rows in by_run.values())
    origin = f"{data['device']}; {data['date']}, by `python results/models.py`"
    stages = ", ".join(dict.fromkeys(taken(row) for rows in by_run.values() for row in rows[None]))
    steps_of = {row["model"]: row["steps"] for row in data["rows"]}
    steps = ", ".join(f"{n} steps of {name}" for name, n in steps_of.items())
    return "\n".join([
        *lines, "",
        f"Tokens/s. {origin}: {steps}. flash.attention took {stages}. No final loss is further than "
        f"{100 * loss:.2f} % from that with {LABELS[theirs[0]]}; our two are apart by up to "
        f"{100 * again:.2f} %."])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    if not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    import torch
    from gpt.data import checksum, corpus

    import flash

    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    data = {"device": flash.describe_device(torch.device("cuda", torch.cuda.current_device())),
            "date": time.strftime("%Y-%m-%d"), "corpus": checksum(corpus()), "rows": []}
    measure(data, args.folder / "backends.json")
    print(backends(args.folder / "backends.json"))


if __name__ == "__main__":
    main()
