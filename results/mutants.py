"""Mutants of the stages, made mechanically, and whether the simulator's checker or a wrong result shows them.

    python results/mutants.py results/cpu                 # all; writes mutants.json there: some 30 minutes
    python results/mutants.py results/cpu --stages flash2 ampere_tuned   # these; what else it has stays
    python results/mutants.py results/cpu --new           # those that mutants.json does not have
    python results/mutants.py results/cpu --again         # those not found there: when the checker has learnt
    python results/mutants.py --list                      # their names alone
    python results/mutants.py results/cpu --missed        # those in mutants.json that nothing has found
    python results/mutants.py results/cpu --stale         # the stages that have changed since

A mutant is one change in the device code of a stage, or of a file of stages/common that stages include:

    a barrier, a fence, a wait (for copies, products, an mbarrier, a buffer, a turn), a commit, an arrival:
        removed; a statement later; a statement earlier; a wait for groups: for one less
    the same with another step, parity, number or count: of the step before or after; of 16 bytes, an arrival
        or a warp more or less
    a bound (<, <=, >, >=, min): larger by one; smaller by one

All mutants of a stage are compiled at once: each is a place where the code asks for the number of the mutant
that runs, which launch() takes from the environment. So a stage takes one build for each d and tile.

A mutant is found if the checker has a finding, the launch fails or hangs, or a result is wrong, or, where
sums have a fixed order, has other bits. One of stages/common is tried in one stage after another, until it is
found. Those that nothing can find since they compute the same are in tests/equivalent_mutants.txt, those that
are missed in tests/missed_mutants.txt, each with the reason.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "results")]

from mutation import NUMBER, Mutant, fingerprint, mutants, schema  # noqa: E402

import flash  # noqa: E402
from flash_ladder.grid import PACKED, STREAM_K, UP_TO_64  # noqa: E402

EQUIVALENT, MISSED = ROOT / "tests" / "equivalent_mutants.txt", ROOT / "tests" / "missed_mutants.txt"
SECONDS = 180                                    # for one mutant, before it counts as hanging

# ------------------------------------------------------------------------------------------ running them
# B, H, H_kv, N_q, N_k, d, diagonal, which of the tiles that it takes (tiles_of), and of which kind the scores
# are (SCORES)
SHAPES = [
    (1, 2, 1, 70, 33, 40, -10, "middling", ""),      # early rows see no key, late ones all
    (1, 1, 1, 100, 70, 64, None, "small", "a large key"),
    (1, 1, 1, 65, 97, 136, 0, "small", ""),          # keys that no row sees
    (1, 1, 1, 191, 63, 40, -65, "middling", "low"),  # a tile of Q sees no key; a key short of whole tiles
    (3, 6, 2, 17, 20, 64, None, "small", ""),        # more heads than a stage keeps together
    (1, 1, 1, 128, 65, 40, -2, "middling", ""),      # a key more than whole tiles; no row past the end
    (1, 1, 1, 130, 80, 72, 0, "tall", ""),
    (1, 1, 1, 64, 64, 64, None, "small", "large"),
]
# For Hopper's forward stages, as well; the tiles are (Br, Bc). Three blocks take several tiles of Q each, one
# after the other, and have two or three warpgroups of consumers. Some of these see nothing of a tile's last
# keys.
MORE_SHAPES = [
    (1, 3, 1, 200, 150, 72, -50, (128, 32), ""),
    (1, 3, 1, 140, 60, 136, None, (128, 16), ""),
    (1, 4, 2, 200, 64, 40, -20, (192, 16), ""),
    (1, 2, 1, 192, 64, 40, -15, (192, 16), ""),      # a warpgroup sees one key of the last tile
    (1, 2, 1, 192, 64, 40, -190, (192, 16), ""),     # one sees none of the only tile
    (1, 1, 1, 128, 49, 40, -79, (128, 32), "a large key"),   # one more than half of the last tile
    (1, 4, 1, 128, 48, 136, -80, (128, 32), ""),     # just half of it
]
# For those where two blocks are a cluster, in their place: each has every other 64 rows, nearly
OF_TWO_BLOCKS = [
    (1, 3, 1, 400, 150, 72, -250, (256, 32), ""),
    (1, 3, 1, 280, 60, 136, None, (256, 16), ""),
    (1, 2, 1, 400, 64, 40, -220, (384, 16), ""),
    (1, 2, 1, 256, 270, 136, 14, (256, 32), ""),     # warpgroups see nothing of up to six tiles
    (1, 1, 1, 256, 49, 40, -207, (256, 32), "a large key"),  # one more than half of the last tile
    (1, 4, 1, 256, 48, 136, -208, (256, 32), ""),    # just half of it
]
# For those that cut equal tiles, as well: eight, five and seven of them, and Tc = 4, 9 and 2
CUT_TILES = [
    (1, 4, 2, 70, 100, 72, None, (128, 32), "a large key"),
    (1, 5, 1, 64, 130, 136, None, (64, 16), ""),
    (1, 7, 1, 50, 33, 40, None, (64, 32), "large"),
]
# For Hopper's backward stages: two warpgroups with keys of their own, one tile of Q after the other
MORE_BACKWARD = [
    (1, 2, 1, 130, 140, 72, -20, (64, 128), ""),     # which share the columns of dQ; heads, too, share keys
    (1, 1, 1, 260, 80, 40, 0, (128, 128), ""),       # and here its rows
    (1, 2, 1, 60, 70, 40, 0, (64, 64), ""),          # one whose keys no row sees
    (1, 4, 4, 130, 140, 72, 0, (64, 128), ""),       # several tiles of keys a block, none of them in parts
]
# For those that make dQ^T by turns where d is a multiple of 16, as well
BY_TURNS = [
    (1, 1, 1, 260, 80, 48, 0, (128, 128), ""),       # three tiles of Q; one of four warps has no dims
    (1, 3, 3, 200, 300, 48, None, (128, 128), ""),   # three tiles of keys a block, which has two buffers
]
# For those of one size: four tiles of Q and more. Where two blocks are a cluster, both have keys; or the last
# cluster's second one has none.
ONE_SIZE = [
    (1, 2, 1, 200, 100, 136, 30, (64, 64), ""),
    (1, 2, 1, 70, 200, 136, 90, (64, 128), ""),
    (1, 4, 2, 200, 300, 136, -60, (64, 128), ""),
]
# For those that add up dQ in the order of tiles of keys: three of them
IN_ORDER = [
    (1, 2, 1, 70, 300, 72, None, (64, 128), ""),
    (1, 1, 1, 260, 300, 40, -10, (128, 128), ""),
]
# And for d > 192, where consumers add a tile in parts, and tell that it is there. No row sees some keys.
IN_PARTS = [
    (1, 2, 1, 200, 200, 200, -70, (64, 64), ""),
    (1, 1, 1, 130, 140, 256, None, (64, 64), ""),
]
# "a large key": the last one's scores are so large, or so low, that e^score is infinite, or 0: a row's own
# maximum must prevent it. "large": all are, and each key is the maximum of some row. "low": all are so low
# that a key past the end, of score 0, is far above them.
SCORES = {"": lambda q, k: None,
          "a large key": lambda q, k: k[:, :, -1].mul_(200),
          "large": lambda q, k: k.mul_(200),
          "low": lambda q, k: (q.add_(5), k.sub_(5))}
# When copies and products are made, and in which order threads and blocks run (docs/simulator.md): Hopper's
# stages are tried in all of them, the others in the first one
SCHEDULES = [{}, {"FLASH_SIM_COPIES": "early"}, {"FLASH_SIM_COPIES": "random", "FLASH_SIM_SEED": "1"}]


def has_fixed_order(stage: flash.Stage) -> bool:
    """Whether blocks that run in any order wait for each other, so that sums have the same bits."""
    return stage.direction == "bwd" and stage.needs == "sm_90a" and stage.can_be_deterministic


def shapes_of(stage: flash.Stage) -> list[tuple]:
    """SHAPES, and what a stage has beside them."""
    more = MORE_SHAPES if stage.direction == "fwd" else MORE_BACKWARD
    if "Br % 128" in stage.limits:               # of a cluster
        more = OF_TWO_BLOCKS
    if stage.name.endswith(STREAM_K):            # of its copy, too
        more = more + CUT_TILES
    if stage.name.endswith(UP_TO_64):
        more = more + BY_TURNS
    if has_fixed_order(stage):
        more = more + IN_ORDER + IN_PARTS * stage.name.endswith(PACKED[-1])
    if "Br <= 128" in stage.limits:              # of two warpgroups at most
        more = [shape for shape in more if shape[-2][0] <= 128]
    if "(64,); Bc" in stage.limits:              # of one size
        size = 64, stage.default_tiles(128)["Bc"]
        more = [shape for shape in more + ONE_SIZE if shape[-2] == size]
    return SHAPES + more * stage.needs.startswith("sm_90")


def tiles_of(stage: flash.Stage, d: int) -> dict[str, dict[str, int]]:
    """Tiles that a stage takes: the smallest, middling ones, and the tallest for their width."""
    taken = []
    for size in sorted((Br * Bc, Br, Bc) for Br in (8, 16, 32, 64, 128) for Bc in (8, 16, 32, 64)):
        try:
            taken.append(stage.tiles(d, 227 * 1024, Br=size[1], Bc=size[2]))
        except ValueError:
            continue
    taken = taken or [stage.default_tiles(d)]    # of one size, and larger
    return {"small": taken[0], "middling": taken[len(taken) // 2],
            "tall": max(taken, key=lambda tiles: tiles["Br"] / tiles["Bc"])}


@dataclass
class Call:
    """tensors: those that go in, by their names in flash_fwd.cu and flash_bwd.cu. expected: results, to the
    bit, where sums have a fixed order; else nothing"""

    stage: flash.Stage
    tensors: dict
    diagonal: int | None
    tiles: dict[str, int]
    expected: tuple = ()

    def errors(self, *results) -> dict[str, tuple[float, float]]:
        """Those of (O, L), or of (dQ, dK, dV), and what is allowed, by name."""
        from flash_ladder import grid

        q, k, v, *rest = self.tensors.values()
        if self.stage.direction == "fwd":
            return grid.errors(*results, q, k, v, self.diagonal)
        _, do, _, dlse = rest
        return grid.gradient_errors(results, q, k, v, do, self.diagonal, None, dlse)

    def results(self) -> tuple:
        """Make it, by way of the library's plans."""
        from flash_ladder import grid, plan

        q, k, v, *rest = self.tensors.values()
        options = plan.choose(self.stage, q, self.stage.direction, **self.tiles)
        with grid.poisoned():
            if self.stage.direction == "fwd":
                return plan.forward(q, k, v, self.diagonal, None, *options)
            o, do, lse, dlse = rest
            return plan.backward(q, k, v, o, lse, do, dlse, self.diagonal, None, *options, False)

    def __call__(self) -> str:
        """What is wrong with the results."""
        from flash_ladder import grid

        results = self.results()
        wrong = grid.wrong(self.errors(*results))
        same = all((a == b).all() for a, b in zip(results, self.expected))
        return wrong or ("" if same else "other bits")


def calls(stage: flash.Stage) -> list[Call]:
    """Those of a stage in its shapes."""
    import torch

    from flash_ladder.reference import random_gradients, random_qkv, reference

    made = []
    for B, H, H_kv, N_q, N_k, d, diagonal, size, scores in shapes_of(stage):
        torch.manual_seed(0)
        dtype = stage.dtypes[0]
        q, k, v = random_qkv(B, H, H_kv, N_q, N_k, d, "cpu", dtype)
        SCORES[scores](q, k)
        tensors = {"Q": q, "K": k, "V": v}
        if stage.direction == "bwd":
            o, lse = reference(q.double(), k.double(), v.double(), diagonal)
            do, dlse = random_gradients(q)
            dlse[lse == -torch.inf] = -torch.inf
            tensors |= {"O": o.to(dtype), "dO": do, "L": lse.float(), "dL": dlse}
        tiles = tiles_of(stage, d)[size] if isinstance(size, str) else dict(zip(("Br", "Bc"), size))
        made.append(Call(stage, tensors, diagonal, tiles))
    return made


def how_found(call) -> str:
    """What shows in a call: the checker's first finding, an error of the launch, or a wrong result; or ""."""
    error = ""
    with flash.inspect() as report:
        try:
            error = call()
        except (RuntimeError, AssertionError) as raised:
            error = str(raised).splitlines()[0]
            if error.startswith("building"):
                raise
    return report.findings[0].what if report.findings else f"wrong: {error}" if error else ""


def work(name: str, numbers: list[int]) -> None:
    """In a process of its own: print a line of JSON for each mutant of a stage. Number 0 is the stage."""
    import torch

    torch.set_num_threads(1)                     # the calls are small: to meet would take more threads longer
    stage = next(s for s in flash.stages() if s.path.name == name)
    file = flash.BUILD / "mutants" / stage.path.name         # always the same: then it is built once
    file.parent.mkdir(parents=True, exist_ok=True)
    # several tiles in a range of keys
    text = re.sub(r"// splits: .*(\n// {9}.*)*", "// splits:  ceil_div(Tc, 3)", schema(stage))
    if not file.is_file() or file.read_text() != text:
        file.write_text(text)
    os.environ[NUMBER] = "0"
    ready = calls(stage := flash.read_stage(file))
    if has_fixed_order(stage):
        ready = [replace(call, expected=call.results()) for call in ready]
    for number in numbers:
        os.environ[NUMBER] = str(number)
        found = ""
        for schedule in SCHEDULES if stage.needs.startswith("sm_90") else SCHEDULES[:1]:
            os.environ |= schedule
            found = found or next((how for call in ready if (how := how_found(call))), "")
            for name in schedule:
                del os.environ[name]
        print(json.dumps([number, found]), flush=True)


def verdicts(stage: flash.Stage, numbers: list[int]) -> Iterator[tuple[int, str]]:
    """How each mutant is found, or "". A worker that dies or hangs has found the one that it was at."""
    left = list(numbers)
    while left:
        worker = subprocess.Popen(
            [sys.executable, __file__, "--work", stage.path.name, *map(str, left)], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        done = 0
        while True:
            timer = threading.Timer(SECONDS if done else 20 * SECONDS, worker.kill)   # it builds first
            timer.start()
            line = worker.stdout.readline()
            timed_out = not timer.is_alive()
            timer.cancel()
            if not line:
                break
            yield tuple(json.loads(line))
            done += 1
        worker.wait()
        if done < len(left):
            errors = worker.stderr.read()
            if not done and (left[0] == 0 or "building" in errors):
                raise RuntimeError(f"{stage.path.name} with its mutants does not run:\n{errors[-3000:]}")
            yield left[done], "hang" if timed_out else "the process ended"
            done += 1
        left = left[done:]


def name_of(row: dict) -> str:
    """The name of the mutant in a row of mutants.json."""
    return Mutant(**{field.name: row[field.name] for field in fields(Mutant)}).name


def run(stages: list[flash.Stage], known: dict, out: Path, new: bool = False, again: bool = False) -> None:
    """Add the mutants of stages to the data of mutants.json: in which stages each was tried, and how the last
    one found it. One of stages/common that a stage has found is not tried in the next. Rows of mutants that
    are gone are left out. new: only mutants without a row; again: only those that were not found. Then the
    stages that they are of stay as stale as they were.
    """
    present = dict.fromkeys(m.name for stage in flash.stages() for m in mutants(stage).values())
    rows = {name: row for row in known["mutants"] if (name := name_of(row)) in present}
    before = set(rows)
    for stage in stages:
        own = {number: m for number, m in mutants(stage).items()
               if (m.file == stage.path.name or not rows.get(m.name, {}).get("how"))
               and not (new and m.name in before)
               and not (again and (m.name not in before or rows[m.name]["how"]))}
        if not own:
            continue
        for number, how in verdicts(stage, [0, *own]):
            if number == 0:
                assert not how, f"{stage.path.name} without a mutation: {how}"
                continue
            mutant = own[number]
            tried = {*rows.get(mutant.name, {}).get("tried", []), stage.path.stem}
            rows[mutant.name] = asdict(mutant) | {"tried": sorted(tried), "how": how}
        mine = [rows[m.name] for m in own.values()]
        print(f"{stage.path.name}: {len(mine)} mutants, {sum(not row['how'] for row in mine)} not found",
              flush=True)
        if not (new or again) or stage.path.stem not in known["stages"]:
            known["stages"] = dict(sorted((known["stages"] | {stage.path.stem: fingerprint(stage)}).items()))
        known |= {"date": str(date.today()), "mutants": [rows[name] for name in present if name in rows]}
        out.write_text(as_json(known))


def as_json(data: dict) -> str:
    """The text of mutants.json: a line for each mutant."""
    rows = ",\n".join(json.dumps(row) for row in data["mutants"])
    rest = json.dumps({key: value for key, value in data.items() if key != "mutants"}, indent=1)
    return f'{rest[:-2]},\n "mutants": [\n{rows}\n]}}\n'


def stale(data: dict) -> list[str]:
    """The stages that mutants.json has, and that have changed since."""
    return [stage.path.stem for stage in flash.stages()
            if data["stages"].get(stage.path.stem, fingerprint(stage)) != fingerprint(stage)]


def reasons(file: Path) -> dict[str, str]:
    """Those of EQUIVALENT or MISSED, by the names of the mutants: a paragraph is a reason, and the names that
    it is for, one a line after two spaces."""
    found = {}
    for part in re.split(r"\n\n+", file.read_text().strip()):
        lines = [line for line in part.splitlines() if not line.startswith("#")]
        reason = " ".join(line for line in lines if not line.startswith("  "))
        found |= {line.strip(): reason for line in lines if line.startswith("  ")}
    return found


# ------------------------------------------------------------------------------------------ the table
BARRIER = "(__sync|__threadfence|named_barrier|cluster|fence_|wgmma_fence)"
# Or a commit, or an arrival
WAIT = "(cp_async|bulk|mbarrier|wgmma_commit|wgmma_wait|wait|fill|release|pass|end|skip|count)"
KINDS = {"a barrier or fence removed": f"{BARRIER}.* removed",
         "a barrier or fence moved": f"{BARRIER}.* a statement .*",
         "a wait or commit removed": f"{WAIT}.* removed",
         "a wait or commit moved": f"{WAIT}.* a statement .*",
         "a wait for one group less": f"{WAIT}.* group less",
         "another step, parity, number or count": r"\w+ of (a|an|the|16) .*",
         "a bound larger by one": r".* \+ 1",
         "a bound smaller by one": ".* - 1"}


def missed(rows: list[dict]) -> list[str]:
    """The names of mutants that nothing has found, and that are not equivalent."""
    same = reasons(EQUIVALENT)
    return [name for row in rows if not row["how"] and (name := name_of(row)) not in same]


def table(data: dict) -> str:
    """What was found, by kind of change, as Markdown."""
    header = ("change", "mutants", "equivalent", "found by the checker", "by the result alone", "missed")
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * (len(header) - 1)]
    for kind, pattern in [*KINDS.items(), ("**all**", ".*")]:
        rows = [row for row in data["mutants"] if re.fullmatch(pattern, row["change"])]
        alone = sum(row["how"].startswith("wrong") for row in rows)
        left = len(missed(rows))
        equal = sum(not row["how"] for row in rows) - left
        numbers = len(rows), equal, len(rows) - equal - left - alone, alone, left
        lines.append(f"| {kind} | {' | '.join(map(str, numbers))} |")
    changed = len(stale(data))
    tried = f"Of {len(data['stages'])} of {len(flash.stages())} stages, {changed} of which have changed since"
    more = f"Hopper's {len(SHAPES + MORE_SHAPES)}, and {len(SHAPES + MORE_BACKWARD)} backward"
    how = f"in {len(SHAPES)} calls each ({more}): ragged, with grouped heads, with masks"
    return "\n".join([*lines, "", f"{tried}: {how}. By `python results/mutants.py`, {data['date']}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--stages", nargs="+", metavar="NAME")
    parser.add_argument("--new", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--missed", action="store_true")
    parser.add_argument("--stale", action="store_true")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.work[0], [int(number) for number in args.work[1:]])
    chosen = [s for s in flash.stages() if not args.stages or {s.name, s.path.stem} & set(args.stages)]
    if args.list:
        names = dict.fromkeys(m.name for stage in chosen for m in mutants(stage).values())
        print(*names, f"{len(names)} mutants", sep="\n")
        return None
    if not args.folder or not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    out = args.folder / "mutants.json"
    keep = out.is_file() and (args.stages or args.new or args.again or args.missed or args.stale)
    data = json.loads(out.read_text()) if keep else {"date": "", "stages": {}, "mutants": []}
    if args.missed or args.stale:
        print(*missed(data["mutants"]) if args.missed else stale(data), sep="\n")
    else:
        run(chosen, data, out, args.new, args.again)
    return None


if __name__ == "__main__":
    main()
