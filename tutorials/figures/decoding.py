"""Drawings of lesson 11: blocks for a GPU's multiprocessors."""

from __future__ import annotations

from matplotlib.figure import Figure

from . import COLOURS, canvas


def places_in_use(blocks: dict[str, int], places: int, most: int = 64) -> Figure:
    """The share of a GPU's places for blocks that have one, against the number of ranges of keys.

    blocks: of one range, by label. Blocks that find no place wait until all others are done: another wave.
    """
    figure, (axes,) = canvas(8, 3.2)
    colours = [COLOURS["Q"], COLOURS["K"], COLOURS["V"]]
    splits = range(1, most + 1)
    for (label, count), colour in zip(blocks.items(), colours, strict=True):
        waves = [-(-count * s // places) for s in splits]
        shares = [count * s / (wave * places) for s, wave in zip(splits, waves, strict=True)]
        axes.plot(splits, shares, color=colour, label=label, linewidth=1.6)
    axes.set(xlabel="ranges of keys", ylabel="places in use", xlim=(1, most), ylim=(0, 1.05))
    axes.legend(fontsize=9, loc="lower right")
    axes.grid(alpha=0.3)
    return figure
