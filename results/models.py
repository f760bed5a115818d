"""Models trained with an attention to choose, by examples/train_gpt.py: its results, for docs/use.md.

    python examples/train_gpt.py --size 124m --dtype bf16 --attention all --backend flash --out FOLDER

Its JSON goes to results/h200/models/, and `make readme` makes a table of what lies there.
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
    return "\n".join([*lines, "", origin])
