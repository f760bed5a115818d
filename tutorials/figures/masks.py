"""Drawings of lesson 10: which tiles masks leave, block ids, random bits, a sink."""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import flash
from tutorials.figures import COLOURS, canvas
from tutorials.figures.flash2 import BLOCKS, MASKED, SKIPPED, WHOLE

SHADE = 0.25       # black over a pair that counts


def gallery(masks: dict[str, flash.masks.Mask], N: int, Br: int, Bc: int, most: int = 4) -> Figure:
    """The tiles of masks, by title: skipped, cut or whole. Where a query sees a key, they are darker."""
    rows = -(-len(masks) // most)
    figure, axes = plt.subplots(rows, min(most, len(masks)), figsize=(11, 2.9 * rows + 0.4), dpi=80,
                                layout="constrained", squeeze=False)
    for panel in axes.flat:
        panel.axis("off")
    for panel, (title, mask) in zip(axes.flat, masks.items()):
        tiles(panel, mask, N, Br, Bc)
        counts = mask.tiles(N, Br=Br, Bc=Bc).counts
        said = ", ".join(f"{n} {name}" for name, n in counts.items())
        panel.set_title(f"{title}\n{said}", fontsize=9)
    legend(figure)
    return figure


def tiles(axes: Axes, mask: flash.masks.Mask, N: int, Br: int, Bc: int) -> None:
    """One of them: of the first batch element and head."""
    found = mask.tiles(N, Br=Br, Bc=Bc)
    axes.set(xlim=(0, N), ylim=(N, 0), aspect="equal")
    axes.axis("off")
    for i, row in enumerate(found.kinds[0, 0].tolist()):
        for j, kind in enumerate(row):
            axes.add_patch(Rectangle((j * Bc, i * Br), Bc, Br, facecolor=(SKIPPED, MASKED, WHOLE)[kind],
                                     edgecolor="#ffffff", linewidth=0.8))
    shade = torch.zeros(N, N, 4)
    shade[..., 3] = SHADE * found.seen[0, 0]
    axes.imshow(shade.numpy(), extent=(0, N, N, 0), interpolation="nearest", zorder=3)


def legend(figure: Figure) -> None:
    patches = [Rectangle((0, 0), 0, 0, facecolor=colour) for colour in (WHOLE, MASKED, SKIPPED, SKIPPED)]
    patches[3].set(facecolor="#000000", alpha=SHADE)
    figure.legend(patches, ["whole: no pair is asked for", "cut: each pair is", "skipped: never loaded",
                            "darker: the query sees the key"],
                  loc="outside lower center", ncols=4, fontsize=9, frameon=False)


def what_is_left(rows: list[dict], xlabel: str) -> Figure:
    """Shares of the full matrix against a window's width. rows: {"width": n, label: share, ...}."""
    figure, (axes,) = canvas(7, 3.2)
    styles = [{"color": COLOURS["grey"], "linestyle": "--"}, {"color": COLOURS["S"]},
              {"color": COLOURS["K"], "linestyle": "", "marker": "o", "markersize": 5}]
    for label, style in zip([name for name in rows[0] if name != "width"], styles):
        axes.plot([row["width"] for row in rows], [row[label] for row in rows], label=label, **style)
    axes.set(xlabel=xlabel, ylabel="of the full matrix", ylim=(0, 1.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return figure


def blocks(mask: flash.masks.Mask, ids: list[int], names: dict[int, str], Br: int, Bc: int) -> Figure:
    """Block ids along both sides of S, and the tiles. names: of blocks; a negative id is padding."""
    figure, (axes,) = canvas(7.5, 4.8)
    N = len(ids)
    tiles(axes, mask, N, Br, Bc)
    wide = N / 28
    for n, number in enumerate(ids):
        colour = COLOURS["grey"] if number < 0 else BLOCKS[number]
        axes.add_patch(Rectangle((n, -1.4 * wide), 1, wide, color=colour, linewidth=0, clip_on=False))
        axes.add_patch(Rectangle((-1.4 * wide, n), wide, 1, color=colour, linewidth=0, clip_on=False))
    axes.text(N / 2, -1.8 * wide, "keys", ha="center", va="bottom", fontsize=9)
    axes.text(-1.8 * wide, N / 2, "queries", ha="right", va="center", fontsize=9, rotation=90)
    there = sorted(set(ids), key=lambda number: (number < 0, number))
    patches = [Rectangle((0, 0), 0, 0, color=COLOURS["grey"] if x < 0 else BLOCKS[x]) for x in there]
    patches += [Rectangle((0, 0), 0, 0, facecolor=colour) for colour in (WHOLE, MASKED, SKIPPED)]
    figure.legend(patches, [*(names[x] for x in there), "whole tile", "cut tile", "skipped tile"],
                  loc="outside right center", fontsize=9, frameon=False)
    return figure


def kept(masks: dict[str, torch.Tensor]) -> Figure:
    """Which elements of P dropout keeps, by title: bools (N_q, N_k)."""
    figure, panels = canvas(11, 3.4, len(masks))
    for axes, (title, keep) in zip(panels, masks.items(), strict=True):
        axes.imshow(keep.numpy(), cmap="Greys", vmin=-0.4, vmax=1.4, interpolation="nearest")
        axes.set_title(title, fontsize=9)
        axes.set(xticks=[], yticks=[], xlabel="key")
    panels[0].set_ylabel("query")
    return figure


def sink(scores: torch.Tensor, sinks: list[float]) -> Figure:
    """P of a row without a sink and with sinks of these logits; what is missing to 1 is the sink's."""
    figure, panels = canvas(11, 2.7, 1 + len(sinks), sharey=True)
    for axes, logit in zip(panels, [-torch.inf, *sinks], strict=True):
        logits = torch.cat((torch.tensor([logit]), scores))
        share, *P = logits.softmax(0).tolist()
        axes.bar(range(1, 1 + len(P)), P, color=COLOURS["P"])
        title, ticks = "no sink", [f"{s:g}" for s in scores.tolist()]
        if logit > -torch.inf:
            axes.bar([-0.5], [share], color=COLOURS["grey"])
            title = f"sink = {logit:g}: it takes {share:.0%}"
        axes.set_title(title, fontsize=9)
        axes.set(xlim=(-1.2, len(P) + 0.7), xticks=[-0.5, *range(1, 1 + len(P))],
                 xticklabels=["sink" if logit > -torch.inf else "", *ticks])
        axes.set_xlabel("scores of the keys", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("share of the row")
    return figure
