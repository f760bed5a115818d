"""Several runs side by side: a table, a JSON file, a plot."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from rich.table import Table

from .data import checksum, corpus
from .training import Result, Settings

MOST_DIFFERENCE = 0.2     # per cent of eager's final loss, or the spread of eager's seeds if that is more


def differences(results: list[Result]) -> dict[str, float]:
    """Of final losses from eager's, in per cent."""
    losses = {each.attention: each.final_loss for each in results if each.final_loss is not None}
    if "eager" not in losses:
        return {}
    return {name: 100 * (loss / losses["eager"] - 1) for name, loss in losses.items() if name != "eager"}


def spread_of(seeds: list[Result]) -> float | None:
    """Of eager's final losses with different seeds: greatest minus least, in per cent of their mean."""
    losses = [each.final_loss for each in seeds if each.final_loss is not None]
    if len(losses) < 2:
        return None
    return 100 * (max(losses) - min(losses)) * len(losses) / sum(losses)


def table_of(results: list[Result], title: str) -> Table:
    table = Table(title=title)
    for column in ("attention", "final loss", "to eager", "tokens/s", "peak memory", "saved"):
        table.add_column(column, justify="left" if column == "attention" else "right")
    apart = differences(results)
    eagers = next((each.peak for each in results if each.attention == "eager"), None)
    for each in results:
        if each.error:
            table.add_row(each.attention, each.error, *["-"] * 4)
            continue
        saved = f"{100 * (1 - each.peak / eagers):.1f} %" if each.peak and eagers else "-"
        table.add_row(each.attention, f"{each.final_loss:.4f}",
                      f"{apart[each.attention]:+.3f} %" if each.attention in apart else "-",
                      f"{each.tokens_per_s:,.0f}" if each.tokens_per_s else "-",
                      f"{each.peak / 2**30:.2f} GiB" if each.peak else "-",
                      saved if each.attention != "eager" else "-")
    return table


def verdict(results: list[Result], spread: float | None) -> str | None:
    """Whether the losses are as near to eager's as they have to be."""
    apart = differences(results)
    if not apart:
        return None
    bar = max(MOST_DIFFERENCE, spread or 0.0)
    seeds = "" if spread is None else f" (eager's seeds are {spread:.2f} % apart)"
    far = [f"{name}, by {abs(x):.3f} %" for name, x in apart.items() if not abs(x) <= bar]
    said = f"further apart: {'; '.join(far)}" if far else "all are"
    return f"within {bar:.2f} % of eager's final loss{seeds}: {said}"


def write_json(file: Path, settings: Settings, steps: int, device: str, results: list[Result],
               spread: float | None) -> None:
    apart = differences(results)
    file.write_text(json.dumps({
        "settings": {**settings.as_text(), "steps": steps}, "device": device,
        "date": time.strftime("%Y-%m-%d"), "corpus": checksum(corpus()), "spread_percent": spread,
        "results": [dataclasses.asdict(each) | {"final_loss": each.final_loss,
                                                "to_eager_percent": apart.get(each.attention)}
                    for each in results]}, indent=1) + "\n")


def plot(file: Path, results: list[Result], title: str) -> None:
    """The curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    styles = {"eager": "-", "sdpa": "--", "flash": ":"}
    for each in results:
        if each.losses:
            steps = range(1, len(each.losses) + 1)
            axes.plot(steps, each.losses, styles[each.attention], label=each.attention)
    axes.set(xlabel="step", ylabel="loss, nats a token", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=150, bbox_inches="tight")
    plt.close(figure)
