"""Writes the parts of README.md that are made from elsewhere: the ladder, from the stages' headers, and the
measured results, from the JSON files here. `make readme` runs it; a test fails when README.md is stale.
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bench  # noqa: E402
import flash  # noqa: E402

SHOWN_N = 1024


def ladder() -> str:
    """The stages as a Markdown table."""
    names = {dtype: name for name, dtype in flash.DTYPES.items()}
    lines = ["| # | stage | types | needs | idea |", "|---|---|---|---|---|"]
    for s in flash.stages():
        types = ", ".join(names[dtype] for dtype in s.dtypes)
        link = f"[{s.name}]({s.path.relative_to(ROOT)})"
        lines.append(f"| {s.number} | {link} | {types} | {s.needs} | {s.idea} |")
    return "\n".join(lines)


def results() -> str:
    """The forward pass on an H200, and the time from an edit to a result."""
    gpu, cpu = (json.loads((ROOT / "results" / f / "bench_fwd.json").read_text()) for f in ("h200", "cpu"))
    table, origin = bench.results_table(gpu, SHOWN_N).split("\n\n")
    return (
        f"{table}\n\n{origin} Measured on {gpu['date'][:10]} by `python bench.py`.\n\n"
        "![time against N](results/h200/bench_fwd_time.png)\n\n"
        "From saving an edited stage to its result, in the same Python process: "
        f"{gpu['edit_to_result_s']:.1f} s with nvcc, on the machine of that GPU; "
        f"{cpu['edit_to_result_s']:.1f} s in the simulator, on {re.search('[0-9]+ cores', cpu['device'])[0]}."
    )


def updated(text: str) -> str:
    """README's text with its parts between <!-- name --> and <!-- end of name --> made anew."""
    for name, make in {"ladder": ladder, "results": results}.items():
        part = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end of {name} -->)", re.S)
        assert part.search(text), f"README.md has no place for {name}"
        text = part.sub(lambda m, make=make: m[1] + make() + m[2], text)
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text()))
