"""Stages broken on purpose: each must give a wrong result or an error, or else the other tests mean nothing.

Barriers that are missing: only some of them show in a result here; test_checker.py removes each.
"""

import re

import pytest
from conftest import check, poisoned, qkv_with_gaps, random_qkv

import flash

BY_NAME = {s.name: s for s in flash.stages()}

# stage, what, pattern, replacement
MUTANTS = [
    *(
        (stage, what, pattern, replacement)
        for stage in ("naive", "tiled", "online_softmax", "flash2")
        for what, pattern, replacement in [
            ("the mask off by one", r"col <= row \+ p.diagonal", "col < row + p.diagonal"),
            ("the mask from the wrong corner", r"col <= row \+ p.diagonal", "col <= row"),
            ("scale missing", r"\? p.scale \* ", "? "),
            ("the wrong key head", r"h / \(p.H / p.H_kv\)", "h % p.H_kv"),
            ("L without the maximum", r"(m|m\[r(?:ow)?\]) \+ logf", "logf"),
            ("a row that sees no key", r"== -INFINITY \? 0.f : ", "== -INFINITY ? -INFINITY : "),
            ("0 / 0 for such a row", r"l(\[r\]|\[row\]|_new\[r\])? == 0.f", "false"),
        ]
    ),
    *((stage, "keys past the end", r"col < p.N_k && \(", "(") for stage in ("online_softmax", "flash2")),
    ("naive", "one key too few", r"col < p.N_k; col\+\+\) o", "col < p.N_k - 1; col++) o"),
    ("online_softmax", "old output not rescaled", r"l_old\[r\] \* alpha\[r\] \* \*o", "l_old[r] * *o"),
    ("online_softmax", "new output not rescaled", r"beta\[r\] \* O_reg", "O_reg"),
    ("online_softmax", "sum not rescaled", r"alpha\[r\] \* l_old\[r\] \+ beta", "l_old[r] + beta"),
    (
        "online_softmax",
        "tiles before the first that sees",
        r"max\(j \* Bc - p.diagonal, 0\) / Br",
        "max(j * Bc - p.diagonal, 0) / Br + 1",
    ),
    ("flash2", "the erratum: diag(...)^-1", r"O_reg\[r\]\[c\] \*= alpha", "O_reg[r][c] /= alpha"),
    ("flash2", "output not rescaled", r"O_reg\[r\]\[c\] \*= alpha", "O_reg[r][c] *= 1.f"),
    ("flash2", "sum not rescaled", r"alpha \* l\[r\]", "l[r]"),
    ("flash2", "causal: a tile of keys too few", r"\(i \+ 1\) \* Br \+ p.diagonal", "i * Br + p.diagonal"),
    ("flash2", "maximum of the lane, not of the row", r"m_new = warp_max\(m_new\);", ""),
    *((stage, "V with the rows of K", r"p.V.stride_n", "p.K.stride_n") for stage in BY_NAME),
    *((stage, "K with the rows of Q", r"p.K.stride_n", "p.Q.stride_n") for stage in BY_NAME),
    *((stage, "O with the rows of V", r"p.O.stride_n", "p.V.stride_n") for stage in BY_NAME),
    ("naive", "O past its end", r"row >= p.N_q \|\| k >= d", "k >= d"),
    ("tiled", "O past its end", r"row < p.N_q && k < d", "k < d"),
    ("online_softmax", "O past its end", r"if \(row >= p.N_q\) continue;", ""),
    ("online_softmax", "workspace of half the size", r"return 2 \* sizeof", "return sizeof"),
    ("flash2", "O past its end", r"if \(row >= p.N_q\) continue;", ""),
    ("flash2", "O past its row", r"if \(k < d\) O", "O"),
]
CASES = [
    (1, 2, 1, 70, 75, 24, "bottom"),
    (1, 4, 2, 100, 40, 24, "bottom"),
    (1, 2, 2, 45, 70, 24, "top"),
    (1, 1, 1, 40, 77, 24, None),
]


def survives(path, seeds=("",)) -> bool:
    """Whether a stage passes all cases, under the default schedule ("") and random ones."""
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            if seed:
                patch.setenv("FLASH_SIM_SEED", seed)
            cases = [(*random_qkv(*shape, "cpu"), {None: None, "top": 0, "bottom": shape[4] - shape[3]}[mask])
                     for *shape, mask in CASES]
            for q, k, v, diagonal in [*cases, qkv_with_gaps("cpu")]:
                try:
                    with poisoned():
                        o, lse = flash._forward(q, k, v, diagonal, None, path, {})
                    check(o, lse, q, k, v, diagonal)
                except (AssertionError, RuntimeError) as error:
                    assert "building" not in str(error), error
                    return False
    return True


@pytest.mark.parametrize("stage", BY_NAME)
def test_without_a_mutation(stage):
    assert survives(BY_NAME[stage].path, ("", "1"))


@pytest.mark.parametrize(
    "stage, what, pattern, replacement", MUTANTS, ids=[f"{m[0]}-{m[1]}" for m in MUTANTS]
)
def test_mutant_is_caught(stage, what, pattern, replacement, tmp_path):
    text, count = re.subn(pattern, replacement, BY_NAME[stage].path.read_text())
    assert count, f"{pattern} is not in {stage} any more"
    mutant = tmp_path / f"{stage}.cuh"
    mutant.write_text(text)
    assert not survives(mutant), what


BARRIERS = [
    (name, n) for name, s in BY_NAME.items() for n in range(s.path.read_text().count("__syncthreads();"))
]


@pytest.mark.parametrize("stage, number", BARRIERS)
def test_missing_barrier_is_caught(stage, number, tmp_path):
    parts = BY_NAME[stage].path.read_text().split("__syncthreads();")
    mutant = tmp_path / f"{stage}.cuh"
    mutant.write_text(
        "__syncthreads();".join(parts[: number + 1])
        + "__syncthreads();".join(["", *parts[number + 1 :]])[16:]
    )
    assert mutant.read_text().count("__syncthreads();") == len(parts) - 2
    assert not survives(mutant, ("", *map(str, range(1, 6))))
