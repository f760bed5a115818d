"""Models trained with an attention to choose, by examples/train_gpt.py: its results, for docs/use.md.

    python examples/train_gpt.py --size 124m --dtype bf16 --attention all --backend flash --out FOLDER

Its JSON goes to results/h200/models/, and `make readme` makes a table of what lies there. In its folder
compiled/ are pairs of runs with --attention flash, one of them with --compile: NAME.json and
NAME_compiled.json.
"""

import json
from pathlib import Path

NAMES = {"eager": "eager", "sdpa": "SDPA", "flash": "flash.attention"}


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
