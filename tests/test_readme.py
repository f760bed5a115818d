"""README.md: its ladder is the registry's, its results are those in results/, its links lead somewhere."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import test_nvcc
import torch

import flash
from flash_ladder.bench import report
from flash_ladder.launch import definitions
from flash_ladder.stage import FIELDS, TAKES

sys.path.insert(0, str(flash.ROOT / "results"))
import counts  # noqa: E402
import hopper  # noqa: E402
import masks  # noqa: E402
import ncu  # noqa: E402
import ncu_hopper  # noqa: E402
import ratios  # noqa: E402
import readme  # noqa: E402

README = flash.ROOT / "README.md"


def test_made_parts_are_up_to_date():
    """Else: make readme."""
    pages = readme.pages()
    assert pages == readme.updated(pages)


def test_own_stage_has_each_line_of_a_header_and_each_macro():
    text = (flash.ROOT / "docs" / "own_stage.md").read_text()
    assert not [field for field in FIELDS if not re.search(rf"^\|[^|]*`{field}:`", text, re.M)]
    assert not [name for name in TAKES if f"`{name}`" not in text]
    backward = next(stage for stage in flash.stages("bwd") if stage.deterministic_on_request)
    macros = definitions(backward, torch.bfloat16, 64, True, {"Br": 64, "Bc": 64}, d_v=32, dropout=True,
                         sink=True, kv_cache=True, page_size=16, varlen=True)
    assert not [name for name in macros if name != "STAGE_FILE" and f"`{name}`" not in text]


def result(direction, device="a GPU", ms=8.0, mib=100, **math):
    """A result of bench.py: two stages, and PyTorch, the values of which may be given."""
    row = {"kind": "stage", "status": "ok", "message": "", "tflops": 1.0, "error": 1e-6, "scratch_bytes": 9}
    rows = []
    for N in (512, 1024, 2048, 4096):
        for name, label, faster, size in [("naive", "naive", 0.5, 200), ("fast", "some + fast", 4, mib // 10),
                                          ("math", "PyTorch math", 1, mib)]:
            rows.append(row | {"N": N, "name": name, "label": label, "median_ms": ms * N / 1024 / faster,
                               "peak_bytes": size * 2**20})
        rows[-1] |= {"kind": "peer"} | math
    return {"date": "2030-01-02T03:04:05", "device": device, "note": "", "results": rows,
            "ceiling": {"what": "a product", "tflops": 9.0}, "edit_to_result_s": 1.0,
            "arguments": {"pass": direction, "forward": ["the best one"]},
            "shape": {"B": 4, "H": 12, "H_kv": 12, "d": 64, "causal": True, "dtype": "fp32"}}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """results(data, ...): readme.py finds these, and no others, in results/h200."""
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    (tmp_path / "h200").mkdir()

    def results(*data):
        for one in data:
            name = {"fwd": "fwd", "bwd": "bwd", "fwd+bwd": "fwd_bwd"}[one["arguments"]["pass"]]
            (tmp_path / "h200" / f"bench_{name}.json").write_text(json.dumps(one))

    return results


def test_long_context(results):
    """The fastest stage beside PyTorch's math, for each pass and N; it says where the latter does not fit."""
    failed = {"status": "out of memory", "median_ms": None, "peak_bytes": None}
    results(result("fwd"), result("bwd", ms=20.0, mib=3000), result("fwd+bwd", **failed))
    lines = readme.long().splitlines()
    assert len(lines) == 2 + 9 + 2 and len({line.count("|") for line in lines[:-2]}) == 1
    assert lines[2] == "| forward | 1024 | 8.00 | some + fast: 2.00 | 4.00 | 100 MiB | 10.0 MiB | 10.0 |"
    assert lines[7] == "| backward | 4096 | 80.0 | some + fast: 20.0 | 4.00 | 2.93 GiB | 300 MiB | 10.0 |"
    assert lines[8] == ("| forward and backward | 1024 | out of memory | some + fast: 2.00 | - | - "
                        "| 10.0 MiB | - |")
    assert lines[-1].startswith("B=4 H=12 d=64 fp32 causal; a GPU. ") and "2030-01-02" in lines[-1]
    results(result("bwd", device="another"))
    with pytest.raises(ValueError, match="; a GPU and on B=4 .*; another: measure all anew"):
        readme.long()


def test_backward_results(results):
    results(result("bwd"))
    text = readme.backward()
    assert "| **some + fast** | **2.00** |" in text and "N=1024" in text and "Measured on 2030-01-02" in text
    assert "made before, by the best one." in text and "`python bench.py --pass bwd`" in text
    assert text.endswith("(results/h200/bench_bwd_time.png)")


def test_host_time(tmp_path, results):
    """Steps by machine, a dash for one that was not taken there; whole calls where there is a GPU."""
    found = {"cpu": {"device": "CPU, in the simulator", "steps": [{"step": "a key", "us": 8.75}]},
             "h200": {"device": "a GPU (sm_90), CUDA", "calls": [
                 {"call": "ours", "forward_us": 34.08, "forward_backward_us": 200.0}],
                 "steps": [{"step": "a key", "us": 5.0}, {"step": "memory", "us": 7.0}]}}
    (tmp_path / "cpu").mkdir()
    for folder, data in found.items():
        text = json.dumps(data | {"date": "2030-01-02", "shape": [1, 2], "dtype": "fp32"})
        (tmp_path / folder / "host.json").write_text(text)
    lines = readme.host().splitlines()
    assert lines[0] == "| us, without a kernel | CPU | a GPU |"
    assert lines[2:4] == ["| a key | 8.8 | 5.0 |", "| memory | - | 7.0 |"]
    assert lines[5].startswith("| us, with the launches: a GPU |") and lines[7] == "| ours | 34.1 | 200.0 |"
    assert "(1, 2), fp32; CPU, in the simulator; 2030-01-02. And (1, 2), fp32; a GPU" in lines[-1]


def ratio_row(direction, dtype, d, causal, N, name, ms, **others):
    """A row as ratios.py writes it."""
    return {"pass": direction, "dtype": dtype, "d": d, "causal": causal, "B": 4, "H": 12, "H_kv": 12, "N": N,
            "name": name, "status": "ok", "median_ms": ms, "tflops": 2.0} | others


def write_ratios(*rows):
    ratios.write({"date": {"fp32": "2030-01-02", "bf16": "2030-01-03", "fp16": "2030-01-03"},
                  "device": "a GPU", "rows": list(rows)}, readme.RESULTS / "h200" / "ratios.json")


def test_ratios(results):
    """PyTorch's time over vectorized's; a dash where one of the two has none."""
    rows = []
    for direction, causal, ratio in [("fwd", True, 1.25), ("fwd", False, 1.0), ("bwd", True, 0.5)]:
        for N in (1024, 2048, 4096):
            rows += [ratio_row(direction, "fp32", 128, causal, N, "vectorized", 3.0),
                     ratio_row(direction, "fp32", 128, causal, N, "efficient", 3.0 * ratio * N / 1024)]
    rows[0]["tflops"] = 17.3
    rows[-1] |= {"status": "out of memory", "median_ms": None}
    write_ratios(*rows, ratio_row("bwd", "bf16", 256, True, 1024, "cp_async", 1.0))
    assert readme.ratios().splitlines() == [
        "| pass | d | mask | N=1024 | N=2048 | N=4096 |", "|---|---:|---|---:|---:|---:|",
        "| forward | 128 | causal | 1.25× | 2.50× | 5.00× |",
        "| forward | 128 | full | 1.00× | 2.00× | 4.00× |",
        "| backward | 128 | causal | 0.50× | 1.00× | - |", "",
        "B=4 H=12 fp32; a GPU; 2030-01-02. The time of PyTorch's efficient backend (3xTF32, on tensor cores) "
        "over that of vectorized, measured by turns: above 1, vectorized is faster. Of these, its best are "
        "17.3 TFLOP/s forward and 2.00 TFLOP/s backward."]


def test_ratios_in_16_bits(results):
    """Beside FlashAttention-2, with TFLOP/s; fp16's columns are empty here, and grouped heads a sentence."""
    rows = [ratio_row("fwd", "fp32", 64, True, 2048, "vectorized", 1.0)]
    write_ratios(*rows)
    assert readme.ratios16() == ""
    for d, H in ((64, 32), (128, 16)):
        for N, B in ((2048, 8), (16384, 1)):
            rows += [ratio_row("fwd", "bf16", d, True, N, "cp_async", 2.0, B=B, H=H, H_kv=H, tflops=334.6),
                     ratio_row("fwd", "bf16", d, True, N, "flash", 2.16, B=B, H=H, H_kv=H)]
    rows += [ratio_row(direction, "bf16", 256, True, 1024, name, ms, B=2, H=8, H_kv=1)
             for direction in ("fwd", "bwd") for name, ms in [("cp_async", 0.1), ("flash", 0.2), ("math", 3)]]
    write_ratios(*rows)
    lines = readme.ratios16().splitlines()
    assert lines[:4] == [
        "| pass | d | mask | bf16 N=2048 | bf16 N=16384 | fp16 N=2048 | fp16 N=16384 |",
        "|---|---:|---|---:|---:|---:|---:|",
        "| forward | 64 | causal | 1.08× (335) | 1.08× (335) | - | - |",
        "| forward | 128 | causal | 1.08× (335) | 1.08× (335) | - | - |"]
    assert lines[5].startswith("B=8, 1 for N=2048, 16384; H=32, 16 for d=64, 128; a GPU; 2030-01-03, by")
    assert lines[7:] == ["With grouped heads, B=2 H=8 H_kv=1 N=1024 d=256 bf16 causal: forward, cp_async "
                         "0.100 ms, PyTorch's FlashAttention-2 0.200 ms, its math backend 3.00 ms; backward, "
                         "cp_async 0.100 ms, PyTorch's FlashAttention-2 0.200 ms, its math backend 3.00 ms."]


def test_masks_that_are_measured(tmp_path, results):
    """Nothing before; then a line a pass, with what a peer takes and how many times that is."""
    assert readme.measured_masks() == ""
    row = {"mask": "bias", "B": 1, "H": 2, "H_kv": 2, "N": 8, "d": 64, "pass": "fwd", "checkpoint": False,
           "status": "ok", "message": "", "pairs": 64, "tflops": 7.0, "peak_bytes": 2048}
    names = (("best", "best", 0.5), ("flex", "PyTorch flex_attention", 2.0),
             ("sdpa", "PyTorch SDPA (math)", 3.0))
    rows = [row | {"name": name, "label": label, "median_ms": ms} for name, label, ms in names]
    (tmp_path / "h200" / "masks.json").write_text(json.dumps(
        {"device": "a GPU", "date": {"bias": "2030-01-02"}, "rows": rows}))
    lines = readme.measured_masks().splitlines()
    assert lines[2] == ("| bias | B=1 H=2 N=8 d=64 | forward | 50.0 % | best | 0.500, 2.00 KiB | 7.00 | "
                        "2.00 (4.0×), 2.00 KiB | 3.00 (6.0×), 2.00 KiB (math) | - |")
    assert lines[4].startswith("bf16; a GPU; 2030-01-02, by") and len(lines) == 5


def test_masks_beside_peers():
    """block_causal by pass and both together; where a peer is faster than the stage, which and how much."""
    times = {"fwd": (1.0, 4.0), "bwd": (3.0, 5.0), "fwd+bwd": (5.0, 15.0)}
    row = {"mask": "block_causal:8", "d": 8, "status": "ok"}
    rows = [row | {"pass": direction, "name": name, "median_ms": ms}
            for direction, both in times.items() for name, ms in zip(("best", "eager"), both)]
    bias = rows[0] | {"mask": "bias", "pass": "bwd"}
    rows += [bias, bias | {"name": "flex", "median_ms": 0.8}, bias | {"name": "sdpa", "median_ms": 0.5},
             bias | {"name": "eager", "status": "failed", "median_ms": None}]
    assert list(masks.beside_peers({"rows": rows})) == [
        "block_causal:8, eager's time over the stage's: 4.0 forward and 1.7 backward, 2.25 of both together, "
        "3.0 checkpointed. 3 was the aim.",
        "Slower than a peer: bias d=8, backward: 1.00 ms, SDPA 0.500."]
    assert not list(masks.beside_peers({"rows": rows[1:2] + rows[-1:]}))


def test_results_in_16_bits(tmp_path, results):
    assert readme.results16() == readme.backward16() == ""
    results(result("bwd"))
    (tmp_path / "h200" / "bf16").mkdir()
    (tmp_path / "h200" / "bench_bwd.json").rename(tmp_path / "h200" / "bf16" / "bench_bwd.json")
    text = readme.backward16()
    assert readme.results16() == "" and "`python bench.py --pass bwd --dtype bf16`" in text
    assert text.endswith("(results/h200/bf16/bench_bwd_time.png)")


def test_bank_conflicts():
    """Those of mma: each of an ldmatrix's four matrices has its eight rows in the same banks."""
    lines = readme.conflicts().splitlines()
    assert [line.split(" | ")[1] for line in lines[2:4]] == ["32", "4"]
    assert lines[5].startswith("B=4 H=12 N=1024 d=64 bf16 causal; NVIDIA H200")


def test_simulated_counts_of_matrices():
    """ldmatrix and cp.async have names of their own, and are not among the plain loads."""
    q, k, v = torch.randn(3, 1, 1, 64, 64, dtype=torch.bfloat16)
    with flash.inspect() as report:
        flash.attention(q, k, v, stage="cp_async", Br=64, Bc=64)
    found = counts.simulated(report, "forward_kernel")
    assert set(found) - set(counts.METRICS.values()) == set(counts.MATRIX.values())
    assert found["ldmatrix wavefronts"] == 4 * found["ldmatrix requests"] > 0
    assert found["cp.async sectors"] == 3 * 64 * 64 * 2 / 32 and found["HBM read requests"] == 0
    assert found["cp.async requests"] == 3 * 64 * 64 * 2 / 16 / 32


def test_calls_that_are_profiled(monkeypatch):
    """Each stage in its own type, for each pass, as the profiler would run it: here in the simulator."""
    marks = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", marks.append)
    calls = [(stage.name, stage.direction, ncu.own_type(stage), True, 1, 1, 16, 16)
             for stage in flash.stages() if stage.name in ("vectorized", "mma")]
    monkeypatch.setattr(sys, "argv", ["-c", json.dumps(calls)])
    exec(ncu.ONE_CALL_EACH.replace('device="cuda"', 'device="cpu"'), {})
    assert len(marks) == len(calls) == 4


def test_the_kernels_of_a_profile_by_stage(monkeypatch):
    """The mark before a call parts the launches; without one for each stage there is no result."""
    stages = flash.stages("bwd")[:2]
    time = {"time": (1.0, "ns")}
    monkeypatch.setattr(ncu, "launches", lambda pattern, *_: iter(
        [(ncu.MARK, {}), ("scores_kernel", time), ("dQ_kernel", time), (ncu.MARK, {}), ("D_kernel", time)]))
    shape = ncu.SHAPE
    found = {s.name: [kernel for kernel, _ in rows] for s, rows in ncu.calls(stages, "x", ["time"], shape)}
    assert found == {"naive": ["scores_kernel", "dQ_kernel"], "recompute": ["D_kernel"]}
    with pytest.raises(ValueError, match="zip"):
        list(ncu.calls(stages[:1], "x", ["time"], shape))


def test_counters_of_hopper(monkeypatch):
    """The longest kernel of each contender; and what the profiler runs, here in the simulator."""
    shapes = [hopper.Shape("large", direction, "bf16", 16, 1, 2, 2, 40, True) for direction in ("fwd", "bwd")]
    chosen = dict(zip(shapes, ("exp2", "split_warps"), strict=True))
    asked, marks = [], []

    def launches(pattern, metrics, *command):
        asked.extend(command)
        for ms in (3.0, 5.0, 4.0, 2.0):      # of a stage, of FlashAttention-3, forward; then backward
            yield ncu.MARK, {}
            for name, share in (("prepare_kernel", 0.1), ("main_kernel", 1.0)):
                yield name, {metric: (1e6 * ms * share, "") for metric in metrics}

    monkeypatch.setattr(ncu, "launches", launches)
    rows = ncu_hopper.profile(chosen, Path("fa3.so"), None)
    assert [(row["direction"], row["name"], row["kernel"]) for row in rows] == [
        (direction, name, "main_kernel") for direction, stage in (("fwd", "exp2"), ("bwd", "split_warps"))
        for name in (stage, "fa3")]
    lines = ncu_hopper.table({"device": "one", "date": "2030-01-02", "rows": rows}).splitlines()
    assert len(lines) == 6
    assert lines[2].startswith("| fwd bf16 d=16 causal B=1 H=2 N=40 | exp2 | 3000000 / 5000000 |")

    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", marks.append)
    monkeypatch.setattr(hopper, "BACKENDS", dict(hopper.BACKENDS))
    what, fa3, cudart = json.loads(asked[1])
    assert (fa3, cudart) == (str(Path("fa3.so").absolute()), "")
    monkeypatch.setattr(sys, "argv", ["-c", json.dumps([what, "", ""])])
    exec(asked[0].replace('"cuda")', '"cpu")'), {})
    assert len(marks) == 2


def test_empty_parts_are_filled(monkeypatch):
    """As those that have a text are; in docs/ links go up."""
    for name in readme.PARTS:
        monkeypatch.setattr(readme, name, lambda name=name: f"made: [{name}](stages/x)")
    marks = {name: (f"<!-- {name} -->\n", f"<!-- end of {name} -->\n") for name in readme.PARTS}
    text = "".join(f"{begin}{end}" for begin, end in marks.values())
    for file, up in (("README.md", ""), ("docs/x.md", "../")):
        made = "".join(f"{begin}made: [{name}]({up}stages/x)\n{end}" for name, (begin, end) in marks.items())
        assert readme.updated({file: text}) == {file: made} == readme.updated({file: made})
    with pytest.raises(AssertionError, match="has a place for ratios"):
        readme.updated({"README.md": text.replace("<!-- ratios -->", "")})
    monkeypatch.setattr(readme, "ratios", lambda: "")  # not measured yet: it needs no place
    made = readme.updated({"README.md": text.replace("<!-- ratios -->\n", "")})["README.md"]
    assert "made: [ratios]" not in made


def test_launches(tmp_path, monkeypatch):
    """What is read from the profiler's output, and what it is asked."""
    profiler = tmp_path / "ncu"
    profiler.write_text(f"""#!/bin/sh
printf '%s\\n' "$@" > {tmp_path}/asked
echo '==PROF== Connected'
echo '"ID","Kernel Name","b.sum","a.pct"'
echo '"","","byte","%"'
echo '"0","void one_kernel<4>(float *)","1,234","5.5"'
echo '"1","two_kernel(int)","7","0"'
""")
    profiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert list(ncu.launches("^(one|two)_kernel$", ["a.pct", "b.sum"], "pass", "naive")) == [
        ("one_kernel", {"a.pct": (5.5, "%"), "b.sum": (1234.0, "byte")}),
        ("two_kernel", {"a.pct": (0.0, "%"), "b.sum": (7.0, "byte")})]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert "regex:^(one|two)_kernel$" in asked and "a.pct,b.sum" in asked and asked[-2:] == ["pass", "naive"]
    profiler.write_text("#!/bin/sh\necho no permission\n")
    with pytest.raises(SystemExit, match="measured nothing of x:\nno permission"):
        list(ncu.launches("x", ["a.pct"], "pass"))


def test_names_of_kernels(tmp_path):
    """For the profiler: those of the stage's source, with bounds on their launch or without."""
    source = tmp_path / "mine.cuh"
    source.write_text("__global__ void a(int x) {}\n__device__ void no(int x) {}\n"
                      "__global__ void __launch_bounds__(max(1, 2), 2)\n  b_kernel(int x) {}\n"
                      "__global__ __launch_bounds__(threads) void c(int x) {}\n")
    assert ncu.kernels([source, source]) == ["a", "b_kernel", "c"]


def test_every_stage_is_in_the_ladder():
    links = re.findall(r"\[(\d+)\]\((stages/\w+\.cuh)\)", README.read_text())
    there = [(str(s.number), str(s.path.relative_to(flash.ROOT))) for s in flash.stages()]
    assert sorted(links) == sorted(there)


def test_readme_is_short():
    """150 lines; the first plot and the ladder on the first screen; no badge."""
    lines = README.read_text().splitlines()
    print(f"README.md: {len(lines)} lines")
    assert len(lines) <= 150
    assert any("results/h200/rungs_" in line for line in lines[:10])
    assert next(n for n, line in enumerate(lines) if line.startswith("| stage |")) < 20
    assert not [line for line in lines if len(line) > 130 and not line.startswith(("|", "![", "TFLOP/s"))]
    assert "shields.io" not in README.read_text() and "badge" not in README.read_text().lower()


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_diffs_are_those_of_the_stages(direction):
    """Each rung's, at the anchor to which README links. Else: make readme."""
    file = flash.ROOT / "docs" / f"diffs_{report.PASSES[direction]}.md"
    assert file.read_text() == readme.diffs(direction)
    headings = re.findall(r"^## (\w+)$", file.read_text(), re.M)
    assert headings == [s.name for s in flash.stages(direction) if s.after]
    for name in headings:
        assert f"(docs/{file.name}#{name})" in README.read_text()


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_every_stage_is_in_the_file_that_is_compiled(direction):
    """With its idea, and its parent where that is not the one before it. Else: make readme."""
    text = (flash.ROOT / f"flash_{direction}.cu").read_text()
    assert text == readme.listed(text, direction)
    words = re.sub(r"\n// +", " ", text)
    for s in flash.stages(direction):
        file = re.escape(s.path.name)
        assert re.search(rf"stages/{file} +(\(after {s.after}\) )?{re.escape(s.idea)}", words)
    first = "//   stages/"
    stale = text.replace(first, f"{first}old.cuh   an idea\n//                     of old\n{first}", 1)
    assert readme.listed(stale, direction) == text
    with pytest.raises(AssertionError, match="has no list of stages"):
        readme.listed("", direction)


def test_links_lead_somewhere():
    for name, text in readme.pages().items():
        links = re.findall(r"\]\((?!http)([^)#]+)(?:#\w+)?\)", text)
        assert links or name != "README.md"
        for link in links:
            assert (flash.ROOT / name).parent.joinpath(link).exists(), f"{name}: {link}"


@pytest.mark.parametrize("page", ["README.md", "docs/use.md"])
def test_python_examples_run(page):
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", (flash.ROOT / page).read_text(), re.S):
        exec(compile(code, page, "exec"), names)
    assert names["o"].shape == (1, 2, 128, 64)


def test_the_breakpoint_is_on_code():
    """The gdb example stops at the line that computes S."""
    file, line = re.search(r"break (\S+):(\d+) if", readme.pages()["docs/simulator.md"]).groups()
    assert "S_reg[r][c] +=" in (flash.STAGES / file).read_text().splitlines()[int(line) - 1]


def test_the_inspected_lines_are_loads_of_K():
    lines = re.findall(r"line[= ]\"?(fwd_\w+\.cuh):(\d+)", readme.pages()["docs/simulator.md"])
    assert len(lines) == 2
    for file, line in lines:
        assert re.search(r"\bK(_smem)?\[", (flash.STAGES / file).read_text().splitlines()[int(line) - 1])


@pytest.mark.parametrize("file", ["flash_fwd.cu", "flash_bwd.cu"])
def test_the_compiler_command(tmp_path, file):
    """As a reader would paste it."""
    if not (nvcc := test_nvcc.NVCC):
        pytest.skip(test_nvcc.WHY_NOT)
    lines = (flash.ROOT / file).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("//   nvcc "))
    end = next(i for i in range(start, len(lines)) if not lines[i].endswith("\\"))
    command = " ".join(line.strip("/ \\") for line in lines[start:end + 1])
    done = subprocess.run(f"{command.replace('nvcc', str(nvcc), 1)} -o {tmp_path}/out", shell=True,
                          cwd=flash.ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "registers" in done.stderr, done.stderr
