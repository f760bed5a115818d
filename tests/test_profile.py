"""What headers and docs/ say that NVIDIA's profiler has seen is what results/h200/ncu_*.json has.

Else: correct the sentence, and read once more what it concludes.
"""

import json
import re

import pytest

import flash
from tutorials.lesson import waiting

SHARED, FMA, TENSOR = "of that, for shared memory", "FMA pipe busy", "tensor cores busy"
ISSUE, HBM, WARPS = "issue slots used", "HBM bandwidth used", "warps, of the most possible"
GLOBAL, OWN, BARRIER = "L1, L2 or HBM", "a fixed latency", "a barrier"      # what warps wait for
CEILING = "TFLOP/s, of the ceiling's"
L1 = "data pipe of L1 and shared memory busy"
# Of a stage: the figures in % in its header, in their order: of its main kernel, or of another one or another
# stage's. Digits: a figure that is not of these profiles.
FIGURES: dict[str, list] = {
    "fwd_01_naive": [("share of time", "scores_kernel"), (L1, "scores_kernel")],
    "fwd_02_tiled": [(L1, "scores_kernel"), (L1, "naive"), (WARPS, "scores_kernel"), (WARPS, "output_kernel"),
                     (HBM, "softmax_kernel")],
    "fwd_03_online_softmax": [HBM],
    "fwd_04_flash2": [SHARED, FMA],
    "fwd_05_register_tiles": [GLOBAL, SHARED, FMA],
    "fwd_06_vectorized": ["6", SHARED, FMA],
    "fwd_07_conflict_free": [SHARED, FMA, GLOBAL],
    "fwd_08_prefetch": [GLOBAL, (GLOBAL, "conflict_free"), FMA],
    "fwd_09_fp32_tuned": ["2", "4", FMA, ISSUE, SHARED, HBM, "77"],
    "fwd_10_wmma": [SHARED, TENSOR],
    "fwd_11_mma": [SHARED, TENSOR],
    "fwd_12_swizzle": [ISSUE, SHARED, TENSOR, (SHARED, "mma"), (TENSOR, "mma")],
    "fwd_13_cp_async": [ISSUE, TENSOR, GLOBAL, (GLOBAL, "swizzle")],
    "fwd_14_exp2": [TENSOR, ISSUE],
    "fwd_17_ampere_tuned": [TENSOR, SHARED, ISSUE],
    "fwd_28_cut_diagonal": ["6", "8", "3"],
    "bwd_01_naive": [("share of time", "scores_kernel"), (L1, "scores_kernel")],
    "bwd_02_recompute": [SHARED, FMA, "L2 busy"],
    "bwd_03_deterministic": [(SHARED, "dKV_kernel"), (SHARED, "dQ_kernel"), ("less time", "dKV_kernel")],
    "bwd_04_register_tiles": [GLOBAL, SHARED, FMA],
    "bwd_05_vectorized": [SHARED, FMA],
    "bwd_06_conflict_free": [FMA, SHARED, ISSUE],
    "bwd_07_fp32_tuned": [FMA, ISSUE, SHARED, HBM, CEILING, "77"],
    "bwd_08_mma": [GLOBAL, TENSOR, SHARED],
    "bwd_10_split_warps": [GLOBAL, BARRIER, TENSOR, SHARED, ISSUE],
    "bwd_11_cp_async": [OWN, GLOBAL, (GLOBAL, "split_warps"), BARRIER, TENSOR],
    "bwd_12_late_dq": [OWN, BARRIER, TENSOR],
    "bwd_15_ampere_tuned": ["3", "4", "11", TENSOR, SHARED, ISSUE],
}


def counters(direction: str) -> dict[tuple[str, str], dict[str, float]]:
    """What the profiler has counted, by its description, of each stage and kernel; the main one's is ""."""
    measured = json.loads((flash.ROOT / "results" / "h200" / f"ncu_{direction}.json").read_text())
    assert measured["shape"] == {"B": 4, "H": 12, "N": 1024, "d": 64, "causal": True}
    found = {}
    for kernel in measured["kernels"]:
        values = {each["what"]: each["value"] for each in kernel.values() if isinstance(each, dict)}
        found[kernel["stage"], kernel["kernel"]] = values
        if values["time"] >= found.get((kernel["stage"], ""), values)["time"]:
            found[kernel["stage"], ""] = values
    return found


def percent(direction: str, stage: str, what: str, of: str = "") -> str:
    """A figure as a header gives it. of: a kernel of the stage; another stage."""
    if what.isdigit():
        return what
    found = counters(direction)
    values = found[stage, of] if (stage, of) in found else found[of, ""]
    if what == CEILING:
        bench = json.loads((flash.ROOT / "results" / "h200" / f"bench_{direction}.json").read_text())
        row = next(row for row in bench["results"] if (row["name"], row["N"]) == (stage, 1024))
        return f"{100 * row['tflops'] / bench['ceiling']['tflops']:.0f}"
    if what == "share of time":
        times = [x["time"] for (name, kernel), x in found.items() if name == stage and kernel]
        return f"{100 * values['time'] / sum(times):.0f}"
    if what == "less time":
        return f"{100 - 100 * values['time'] / found['recompute', '']['time']:.0f}"
    if what in (GLOBAL, OWN, BARRIER):
        return f"{100 * waiting(values, what):.0f}"
    return f"{values[what]:.1f}" if values[what] < 0.5 else f"{values[what]:.0f}"


def test_figures_of_the_backward_pass():
    """In docs/measurements.md: recompute's kernel beside the one without atomics and fifth product."""
    text = " ".join((flash.ROOT / "docs" / "measurements.md").read_text().split())
    found = counters("bwd")
    with_it, without = (found[kernel]["time"] / 1e6 for kernel in (("recompute", ""),
                                                                    ("deterministic", "dKV_kernel")))
    assert f"its kernel takes {with_it:.2f} ms, without both {without:.2f} ms" in text
    assert f"is busy {found['recompute', '']['L2 busy']:.0f} % of the time" in text


def said(stage: flash.Stage) -> list[str]:
    """The percentages in a stage's header."""
    header = re.match(r"(//.*\n)+", stage.path.read_text())[0]
    return re.findall(r"(\d[\d.]*) ?%(?! \d)", re.sub(r"\n// *", " ", header))


@pytest.mark.parametrize("stage", flash.stages(), ids=lambda stage: stage.path.stem)
def test_figures_in_a_header(stage):
    name = stage.path.stem
    figures = [(each,) if isinstance(each, str) else each for each in FIGURES.get(name, [])]
    assert said(stage) == [percent(stage.direction, stage.name, *figure) for figure in figures]
