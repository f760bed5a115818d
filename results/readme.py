"""Writes the parts of README.md and docs/ that are made from elsewhere: the ladder, from the stages' headers,
the measured results, from the JSON files here, and a finding of the checker, from a stage broken on purpose.
Also the lists of stages in flash_fwd.cu and flash_bwd.cu, the staircases, and what the stages' headers say is
measured (headers.py). `make readme` runs it; a test fails when one is stale.
"""

import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import decode  # noqa: E402
import dropout  # noqa: E402
import headers  # noqa: E402
import hopper  # noqa: E402
import masks  # noqa: E402
import models  # noqa: E402
import ncu_hopper  # noqa: E402
import varlen  # noqa: E402
import without  # noqa: E402
from simulated import (  # noqa: E402, F401 - by their names in PARTS
    backward_timelines,
    conflicts,
    counts,
    finding,
    planted_bugs,
    sampled_mutants,
    stage_mutants,
    timelines,
    traffic,
)

import flash  # noqa: E402
from flash_ladder.bench import competitors, report, staircase  # noqa: E402
from tutorials.exercises import EXERCISES  # noqa: E402

RESULTS = ROOT / "results"
SHOWN_N = 1024
LONG = (1024, 2048, 4096)
SIXTEEN = ("bf16", "fp16")
POINTED_AT = (  # in the texts, with the file and the code of the line
    (r"(--line fwd_01_naive\.cuh:)\d+", "fwd_01_naive.cuh", "s += Q["),
    (r"(line=\"fwd_04_flash2\.cuh:)\d+", "fwd_04_flash2.cuh", "= K_smem["),
    (r"(break fwd_04_flash2\.cuh:)\d+", "fwd_04_flash2.cuh", "S_reg[r][c] +="))


def ladder() -> str:
    """Both ladders as one Markdown table, a rung a line: the stage that it grew from, its files, their
    differences, and, in bold at the end of a branch, the architecture from which on calls take it."""
    by_name: dict[str, dict[str, flash.Stage]] = {}
    for s in flash.stages():
        by_name.setdefault(s.name, {})[s.direction] = s
    lines = ["| stage | after | forward | backward | idea |", "|---|---|---|---|---|"]
    for name, found in by_name.items():
        first = next(iter(found.values()))
        alone = "".join(f", {report.PASSES[s.direction]} alone" for s in found.values()
                        if s.default and len({other.default for other in found.values()}) > 1)
        default = f" [{first.default}{alone}]" if first.default else ""
        bold = "**" if first.default else ""
        cells = [cell(found[direction]) if direction in found else "" for direction in ("fwd", "bwd")]
        after = dict.fromkeys(s.after for s in found.values() if s.after)
        row = [f"{bold}{name}{bold}{default}", ", ".join(after), *cells, first.idea]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def cell(stage: flash.Stage) -> str:
    """A link to a stage, and one to its difference from its parent."""
    link = f"[{stage.number}]({stage.path.relative_to(ROOT)})"
    anchor = f"docs/diffs_{report.PASSES[stage.direction]}.md#{stage.name}"
    return f"{link}, [diff]({anchor})" if stage.after else link


def diffs(direction: str) -> str:
    """A page with the differences of all rungs of a ladder from their parents."""
    what = report.PASSES[direction]
    parts = [f"# What each {what} rung changes", "Made by `make readme` from the stages; "
             "`python flash.py diff NAME` prints one, `flash.diff(...)` shows it in a notebook."]
    for stage in flash.stages(direction):
        if stage.after:
            found = flash.diff(stage)
            lines = "\n".join(line.rstrip() for line in found.lines)
            parts.append(f"## {stage.name}\n\n{stage.idea[0].upper()}{stage.idea[1:]}.\n\n{found.title}\n\n"
                         f"```diff\n{lines}\n```")
    return "\n\n".join(parts) + "\n"


def speed() -> str:
    """What calls take beside the first rung and PyTorch's backends, at N = 4096; fp32 causal only."""
    data = headers.measured_rungs()
    peers_of = {"fp32": ("PyTorch efficient (3xTF32)",), "bf16": ("PyTorch flash", "PyTorch cuDNN")}
    lines = ["| | d | mask | first rung | what calls take | PyTorch |", "|---|---:|---|---:|---:|---|"]
    instead: dict[str, str] = {}         # of rungs that are not measured: the parents
    shapes = dict.fromkeys(
        (row["dtype"], row["pass"], row["d"], row["causal"]) for row in data["rows"]
        if row["N"] == 4096 and row["d"] < 256 and (row["causal"] or row["dtype"] != "fp32"))
    for dtype, direction, d, causal in shapes:
        rows = {row["name"]: row for row in data["rows"] if row["status"] == "ok" and row["N"] == 4096 and
                (row["dtype"], row["pass"], row["d"], row["causal"]) == (dtype, direction, d, causal)}
        ladder = [row for row in rows.values() if row["kind"] == "stage"]
        sizes = {"B": 4, "H": 2048 // d, "H_kv": 2048 // d, "N_q": 4096, "N_k": 4096, "d": d, "gradients": 0,
                 "masked": int(causal), "causal": int(causal)}      # in 16 bits; fp32 has one stage for all
        stages = {s.name: s for s in flash.stages(direction) if flash.DTYPES[dtype] in s.dtypes}
        taken = max((s for s in reversed(stages.values()) if s.default and s.is_for(sizes)),
                    key=lambda s: (bool(s.calls), s.default))                   # as best_stage()
        if taken.name not in rows:
            instead[taken.name] = taken.after
        end = rows[instead.get(taken.name, taken.name)]
        peers = [f"{name.removeprefix('PyTorch ')} {rows[name]['tflops']:.0f}" for name in peers_of[dtype]
                 if name in rows]
        lines.append(f"| {report.PASSES[direction]}, {dtype} | {d} | {'causal' if causal else 'full'} | "
                     f"{ladder[0]['name']} {report.number(ladder[0]['tflops'])} | {end['name']} "
                     f"**{end['tflops']:.0f}** | {', '.join(peers)} |")
    origin = (f"TFLOP/s at N=4096, B=4 (H d = 768 or 1536 in fp32, 2048 in bf16); {data['device']}; measured "
              f"on {staircase.dates(data, data['rows'])} by `python bench.py --rungs`. flash is PyTorch's "
              "FlashAttention-2.")
    for name, parent in instead.items():
        origin += f" Calls take {name}, which was not measured there: {parent}, its parent, stands for it."
    return "\n".join([*lines, "", origin])


def host() -> str:
    """A call's host time by step, without a kernel, on each machine; on a GPU whole calls, too."""
    found = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*/host.json"))]
    names = [data["device"].split(" (")[0].split(",")[0] for data in found]
    times = [{row["step"]: f"{row['us']:.1f}" for row in data["steps"]} for data in found]
    steps = dict.fromkeys(step for machine in times for step in machine)
    parts = ["\n".join([f"| us, without a kernel | {' | '.join(names)} |", "|---|" + "---:|" * len(found),
                        *(f"| {step} | {' | '.join(machine.get(step, '-') for machine in times)} |"
                          for step in steps)])]
    for name, data in zip(names, found):
        if calls := data.get("calls"):
            parts.append("\n".join([f"| us, with the launches: {name} | forward | forward and backward |",
                                    "|---|---:|---:|",
                                    *(f"| {row['call']} | {row['forward_us']:.1f} | "
                                      f"{row['forward_backward_us']:.1f} |" for row in calls)]))
    origins = [f"{tuple(data['shape'])}, {data['dtype']}; {data['device']}; {data['date']}" for data in found]
    return "\n\n".join([*parts, f"(B, H, N, d) = {'. And '.join(origins)}. By `python results/host.py`. "
                                 "Without a kernel: in its place is a function that returns at once."])


def beside_libraries() -> str:
    """What calls take on Hopper beside the best libraries, on each GPU that it was measured on."""
    parts = []
    for file in sorted(RESULTS.glob("*/hopper.json")):
        data = json.loads(file.read_text())
        measured = hopper.with_fa4(data["rows"], file.parent)
        names = sorted(dict.fromkeys(row["name"] for row in measured),
                       key=lambda name: name in hopper.LABELS)
        rows = sorted(measured, key=lambda row: row["case"] != "large")
        heads = [*(hopper.LABELS.get(name, name) for name in names), "of the best"]
        lines = [f"| shape | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
        for shape, each in hopper.by_shape(rows).items():
            tflops = {row["name"]: row["tflops"] for row in each}
            ours = next(name for name in tflops if name not in hopper.LABELS)
            cells = [f"{tflops[name]:.0f}" if tflops.get(name) else "-" for name in names]
            lines.append(f"| {shape} | {' | '.join(cells)} | {hopper.ratio(each, ours):.2f} |")
        origin = (f"TFLOP/s, by turns; {data['device']}; {data['date']}, by `python results/hopper.py`. The "
                  "last column: the best library's time over that of the stage.")
        if "fa4" in names:
            there = json.loads((file.parent / "fa4.json").read_text())
            origin += (" FlashAttention-4 was not in this run: it counts as FlashAttention-3's figure times "
                       f"the ratio of both in another run ({there['source']}; fp16 by the same ratio).")
        short = re.sub(r"^NVIDIA |( 80GB HBM3)? \(.*", "", data["device"])
        parts += [f"{hopper.summary(measured)}\n\n{short}: the best library's time over that of the stage, "
                  "the least and the greatest.", "\n".join([*lines, "", origin])]
    return "\n\n".join(parts)


def rungs() -> str:
    """What each rung gives: pictures and, beside what was predicted, a table; empty before it is measured."""
    folder = headers.RUNGS.parent.name
    if not (data := headers.measured_rungs(RESULTS / folder / headers.RUNGS.name)):
        return ""
    parts = []
    for direction, dtype in staircase.figures(data):
        what = f"{report.PASSES[direction]}, {dtype}"
        parts.append(f"![TFLOP/s by rung: {what}](results/{folder}/rungs_{direction}_{dtype}.png)")
    for direction in dict.fromkeys(row["pass"] for row in data["rows"]):
        lines = [f"| {report.PASSES[direction]} | after | predicted | measured |", "|---|---|---|---|"]
        for stage in flash.stages(direction):
            factors = [factor for *_, factor in headers.gains(data, direction, stage.name)]
            ends = dict.fromkeys(f"{end:.2f}×" for end in (min(factors), max(factors))) if factors else "-"
            lines.append(f"| {stage.name} | {stage.after or '-'} | {stage.predicted or '-'} | "
                         f"{' to '.join(ends)} |")
        parts.append("\n".join(lines))
    origin = (f"{data['device']}; measured on {staircase.dates(data, data['rows'])} by `python bench.py "
              "--rungs`, by turns. A rung's gain is its TFLOP/s over its parent's: the least and the "
              "greatest of the shapes in the pictures.")
    return "\n\n".join([*parts, origin])


def listing(direction: str) -> str:
    """The ladder as flash_fwd.cu and flash_bwd.cu list it in comments: files, ideas, and the parent where it
    is not the stage before."""
    known = flash.stages(direction)
    files = [f"//   {s.path.relative_to(ROOT)}" for s in known]
    width = max(map(len, files)) + 3
    lines = []
    for file, s, before in zip(files, known, [None, *known]):
        after = f"(after {s.after}) " if before and s.after != before.name else ""
        lines.append(textwrap.fill(after + s.idea, 110, initial_indent=f"{file:{width}}",
                                   subsequent_indent=f"//{'':{width - 2}}", break_on_hyphens=False))
    return "\n".join(lines) + "\n"


def listed(text: str, direction: str) -> str:
    """The text of flash_fwd.cu or flash_bwd.cu with its list made anew."""
    part = re.compile(r"(//   stages/\w+\.cuh .*\n(//    +\S.*\n)*)+")
    assert part.search(text), f"flash_{direction}.cu has no list of stages"
    return part.sub(lambda _: listing(direction), text, count=1)


def bench_json(device: str, direction: str) -> dict:
    """A result of bench.py in one of the folders here."""
    return json.loads((RESULTS / device / f"bench_{direction.replace('+', '_')}.json").read_text())


def measured(direction: str, folder: str = "h200", options: str = "") -> str:
    """A pass on an H200: the bench's table and plot. options: others than the pass, of bench.py."""
    data = bench_json(folder, direction)
    table, origin = report.results_table(data, SHOWN_N).split("\n\n")
    options = f" --pass {direction}" * (direction != "fwd") + options
    return (f"{table}\n\n{origin} Measured on {data['date'][:10]} by `python bench.py{options}`.\n\n"
            f"![time against N](results/{folder}/bench_{direction}_time.png)")


def measured16(direction: str) -> str:
    """The same in bf16; empty before it is measured."""
    there = (RESULTS / "h200" / "bf16" / f"bench_{direction}.json").exists()
    return measured(direction, "h200/bf16", " --dtype bf16") if there else ""


def results() -> str:
    """The forward pass on an H200, and the time from an edit to a result."""
    gpu, cpu = bench_json("h200", "fwd"), bench_json("cpu", "fwd")
    return (
        f"{measured('fwd')}\n\n"
        "From saving an edited stage to its result, in the same Python process: "
        f"{gpu['edit_to_result_s']:.1f} s with nvcc, on the machine of that GPU; "
        f"{cpu['edit_to_result_s']:.1f} s in the simulator, on {re.search('[0-9]+ cores', cpu['device'])[0]}."
    )


def backward() -> str:
    """The backward pass on an H200."""
    return measured("bwd")


def results16() -> str:
    """The forward pass on an H200, in bf16."""
    return measured16("fwd")


def backward16() -> str:
    """The backward pass on an H200, in bf16."""
    return measured16("bwd")


def ratio_rows(*dtypes: str) -> tuple[list[dict], str]:
    """The rows of these types that ratios.py has measured, and their device and dates."""
    data = json.loads((RESULTS / "h200" / "ratios.json").read_text())
    dates = sorted({data["date"][dtype] for dtype in dtypes if dtype in data["date"]})
    return ([row for row in data["rows"] if row["dtype"] in dtypes],
            f"{data['device']}; {' and '.join(dates)}")


def ratio_table(rows: list[dict], peer: str, columns: dict[tuple, str], tflops: bool = False) -> list[str]:
    """A line for each pass, d and mask: the peer's time over the stage's, perhaps with the stage's TFLOP/s.
    columns: their heads by type and N."""
    found = {(row["pass"], row["d"], row["causal"], row["dtype"], row["N"],
              row["name"] if row["name"] in competitors.PEERS else "stage"): row for row in rows}
    lines = [f"| pass | d | mask | {' | '.join(columns.values())} |",
             "|---|---:|---|" + "---:|" * len(columns)]
    for direction, d, causal in dict.fromkeys(key[:3] for key in found):
        cells = []
        for column in columns:
            ours, theirs = (found.get((direction, d, causal, *column, name)) for name in ("stage", peer))
            fits = ours and theirs and ours["status"] == theirs["status"] == "ok"
            cells.append(f"{theirs['median_ms'] / ours['median_ms']:.2f}×" if fits else "-")
            if fits and tflops:
                cells[-1] += f" ({ours['tflops']:.0f})"
        mask = "causal" if causal else "full"
        lines.append(f"| {report.PASSES[direction]} | {d} | {mask} | {' | '.join(cells)} |")
    return lines


def measured_stages(rows: list[dict]) -> str:
    """The names of the stages in ratios.py's rows: those that were the best when they were measured."""
    return " and ".join(dict.fromkeys(row["name"] for row in rows if row["name"] not in competitors.PEERS))


def ratios() -> str:
    """The speed of the best fp32 stage on an H200, as a multiple of PyTorch's efficient backend's."""
    rows, origin = ratio_rows("fp32")
    ours = measured_stages(rows)
    lines = ratio_table(rows, "efficient", {("fp32", N): f"N={N}" for N in LONG})
    best: dict[str, float] = {}
    for row in rows:
        if row["name"] not in competitors.PEERS:
            best[row["pass"]] = max(best.get(row["pass"], 0), row["tflops"] or 0)
    most = " and ".join(f"{report.number(tflops)} TFLOP/s {report.PASSES[direction]}"
                        for direction, tflops in best.items())
    shape = ", ".join({f"B={row['B']} H={row['H']}" for row in rows})
    return "\n".join([*lines, "", f"{shape} fp32; {origin}. The time of PyTorch's efficient backend "
                      f"(3xTF32, on tensor cores) over that of {ours}, measured by turns: above 1, "
                      f"{ours} is faster. Of these, its best are {most}."])


def ratios16() -> str:
    """The same of the best stage in 16 bits and PyTorch's FlashAttention-2; empty before it is measured."""
    rows, origin = ratio_rows(*SIXTEEN)
    if not rows:
        return ""
    ours = measured_stages(rows)
    alone, grouped = ([row for row in rows if (row["H"] != row["H_kv"]) == group] for group in (False, True))
    batches = dict(sorted({row["N"]: row["B"] for row in alone}.items()))
    heads = dict(sorted({row["d"]: row["H"] for row in alone}.items()))
    columns = {(dtype, N): f"{dtype} N={N}" for dtype in SIXTEEN for N in batches}
    lines = ratio_table(alone, "flash", columns, tflops=True)
    shape = (f"B={', '.join(map(str, batches.values()))} for N={', '.join(map(str, batches))}; "
             f"H={', '.join(map(str, heads.values()))} for d={', '.join(map(str, heads))}")
    more = ["", grouped_heads(grouped)] if grouped else []
    return "\n".join([*lines, "", f"{shape}; {origin}, by `python results/ratios.py`. The time of PyTorch's "
                      f"FlashAttention-2 over that of {ours}, measured by turns: above 1, {ours} is "
                      f"faster. In parentheses, {ours}'s TFLOP/s.", *more])


def grouped_heads(rows: list[dict]) -> str:
    """A sentence on the shape whose query heads share key heads."""
    labels = {"flash": "PyTorch's FlashAttention-2", "math": "its math backend"}
    passes = []
    for direction in dict.fromkeys(row["pass"] for row in rows):
        times = (f"{labels.get(row['name'], row['name'])} {report.number(row['median_ms'])} ms"
                 for row in rows if row["pass"] == direction)
        passes.append(f"{report.PASSES[direction]}, {', '.join(times)}")
    shape = " ".join(f"{name}={rows[0][name]}" for name in ("B", "H", "H_kv", "N", "d"))
    mask = "causal" if rows[0]["causal"] else "full"
    return f"With grouped heads, {shape} {rows[0]['dtype']} {mask}: {'; '.join(passes)}."


def long() -> str:
    """Every pass at long N on an H200: PyTorch's N x N version beside the fastest stage."""
    header = ("pass", "N", "PyTorch math (ms)", "best stage (ms)", "speed-up", "PyTorch math, peak memory",
              "best stage, peak memory", "x less")
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * (len(header) - 1)]
    origins, dates, number = set(), set(), report.number
    for direction, what in report.PASSES.items():
        data = bench_json("h200", direction)
        origins.add(f"{report.title(data).split(', ', 1)[1]}; {data['device']}")
        dates.add(data["date"][:10])
        for N in LONG:
            rows = [row for row in data["results"] if row["N"] == N]
            math = next(row for row in rows if row["name"] == "math")
            best = min((row for row in rows if row["kind"] == "stage" and row["status"] == "ok"),
                       key=lambda row: row["median_ms"])
            fits = math["status"] == "ok"
            cells = (number(math["median_ms"]) if fits else math["status"],
                     f"{best['label']}: {number(best['median_ms'])}",
                     number(math["median_ms"] / best["median_ms"] if fits else None),
                     *(report.size(row["peak_bytes"]) for row in (math, best)),
                     number(math["peak_bytes"] / best["peak_bytes"] if fits else None))
            lines.append(f"| {what} | {N} | {' | '.join(cells)} |")
    if len(origins) > 1:
        raise ValueError(f"the passes were measured apart, on {' and on '.join(sorted(origins))}: "
                         "measure all anew with python bench.py --pass all")
    return "\n".join([*lines, "", f"{origins.pop()}. Peak memory: with the tensors that go in and come out. "
                      f"Measured on {' and '.join(sorted(dates))} by `python bench.py --pass all`."])


def of_each_gpu(name: str, table: Callable[[dict], str]) -> str:
    """A table of name.json of each GPU that has one, the latest first."""
    def date(data: dict) -> str:
        return max(data["date"].values()) if isinstance(data["date"], dict) else data["date"]
    found = [json.loads(file.read_text()) for file in RESULTS.glob(f"*/{name}.json")]
    return "\n\n".join(map(table, sorted(found, key=date, reverse=True)))


def measured_masks() -> str:
    """Masks beside PyTorch's."""
    return of_each_gpu("masks", masks.table)


def measured_dropout() -> str:
    """What dropout costs."""
    return of_each_gpu("dropout", dropout.table)


def measured_varlen() -> str:
    """Packed sequences on an H200; empty before they are measured."""
    file = RESULTS / "h200" / "varlen.json"
    return varlen.table(json.loads(file.read_text())) if file.exists() else ""


def measured_without() -> str:
    """hopper_tuned without its parts."""
    return of_each_gpu("without", without.table)


def counters_of_hopper() -> str:
    """What Hopper's ends are busy with, beside FlashAttention-3."""
    return of_each_gpu("ncu_hopper", ncu_hopper.table)


def measured_decode() -> str:
    """Decode steps."""
    return of_each_gpu("decode", decode.table)


def measured_models() -> str:
    """Models trained on an H200."""
    return models.table(RESULTS / "h200" / "models")


def measured_backends() -> str:
    """examples/train_gpt.py beside SDPA's backends."""
    return models.backends(RESULTS / "h200" / "backends.json")


def lessons() -> str:
    """The notebooks as a Markdown table: title, exercises and bug hunts of each."""
    lines = ["| lesson | exercises | bug hunts |", "|---|---|---|"]
    for file in sorted((ROOT / "tutorials").glob("[0-9][0-9]_*.ipynb")):
        title = "".join(json.loads(file.read_text())["cells"][0]["source"]).splitlines()[0].removeprefix("# ")
        ours = [e for e in EXERCISES if e.lesson == file.name[:2]]
        names = ["<br>".join(f"{e.number}. {e.title}" for e in ours if e.is_hunt == hunt)
                 for hunt in (False, True)]
        lines.append(f"| [{title}](tutorials/{file.name}) | {names[0]} | {names[1]} |")
    return "\n".join(lines)


PARTS = ("ladder", "speed", "lessons", "host", "rungs", "results", "backward", "ratios", "long", "results16",
         "backward16", "ratios16", "measured_masks", "measured_dropout", "measured_varlen", "measured_decode",
         "measured_without", "counters_of_hopper",
         "measured_models", "measured_backends", "beside_libraries", "finding", "traffic", "counts",
         "conflicts", "planted_bugs", "stage_mutants", "sampled_mutants", "timelines", "backward_timelines")


def updated(texts: dict[str, str]) -> dict[str, str]:
    """The texts of README.md and docs/, by their paths, with the parts between <!-- name --> and
    <!-- end of name --> made anew. What is not measured yet needs no place."""
    texts = dict(texts)
    for name in PARTS:
        if not (made := globals()[name]()):
            continue
        part = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.S)
        places = [file for file, text in texts.items() if part.search(text)]
        assert places, f"neither README.md nor docs/ has a place for {name}"
        for file in places:
            local = made if "/" not in file else re.sub(r"\]\((?!http|#)", "](../", made)
            texts[file] = part.sub(lambda m, made=local: m[1] + made + "\n" + m[2], texts[file])
    for pointer, file, code in POINTED_AT:
        lines = (flash.STAGES / file).read_text().splitlines()
        number = next((n for n, line in enumerate(lines, 1) if code in line), None)
        assert number, f"{file} has no line with {code}, to which docs/ point"
        texts = {name: re.sub(pointer, rf"\g<1>{number}", text) for name, text in texts.items()}
    return texts


def pages() -> dict[str, str]:
    """README.md and docs/*.md, but what is made whole."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(file.relative_to(ROOT)): file.read_text() for file in files
            if not file.name.startswith("diffs_")}


def main() -> None:
    """Renew headers, pictures, lists, README.md and docs/, in this order: some are made from those before."""
    headers.renew()
    if data := headers.measured_rungs():
        staircase.draw_all(data, headers.RUNGS.parent)
    for direction in ("fwd", "bwd"):
        source = ROOT / f"flash_{direction}.cu"
        source.write_text(listed(source.read_text(), direction))
        (ROOT / "docs" / f"diffs_{report.PASSES[direction]}.md").write_text(diffs(direction))
    for name, text in updated(pages()).items():
        (ROOT / name).write_text(text)


if __name__ == "__main__":
    main()
