"""Stages broken on purpose: each must give a wrong result or an error, or else the other tests mean nothing.

Barriers that are missing: only some of them show in a result here; test_checker.py removes each.

The mutants of results/mutants.py are made mechanically, and run under the checker. Here run a few of them, or
all, which takes half an hour: FLASH_ALL_MUTANTS=1.
"""

import json
import os
import re
import sys
import warnings

import pytest
import torch
from conftest import (
    check,
    check_gradients,
    poisoned,
    qkv_with_gaps,
    random_gradients,
    random_qkv,
    reference,
    with_gaps,
)

import flash
from flash_ladder import plan
from flash_ladder.grid import SIDE_BRANCH, is_end
from tutorials.exercises.exercise import inlined

sys.path.insert(0, str(flash.ROOT / "results"))
import mutants  # noqa: E402
import mutation  # noqa: E402

BY_NAME = {s.name: s for s in flash.stages("fwd")}
BY_TMA = [name for name, stage in BY_NAME.items() if stage.needs.startswith("sm_90")]
PACKED_ROWS = "split_kv_wgmma",        # has no head of Q
STORED_BY_TMA = [name for name in BY_TMA if "store_panels(O_map" in BY_NAME[name].path.read_text()]
BACKWARD = {s.name: s for s in flash.stages("bwd")}
STAGES = flash.stages()


def name_of(stage):
    return f"{stage.direction}-{stage.name}"


# What is wrong with the mask: what, pattern, replacement. The rule itself, in stages/masks, stays.
SEES = r"sees_by\(rule, row, col\)"
OFF_BY_ONE = "the mask off by one", SEES, "sees_by(rule, row, col + CAUSAL)"
WRONG_CORNER = "the mask from the wrong corner", SEES, "(CAUSAL ? col <= row : true)"
PAST_THE_END = "keys past the end", rf"col < N_k && {SEES}", "(!CAUSAL || sees_by(rule, row, col))"
TILE_TOO_FEW = "causal: a tile of keys too few", r"\bseen_by\(end_row - 1\)", "seen_by(row)"

# stage, what, pattern, replacement
MUTANTS = [
    *(
        (stage, what, pattern, replacement)
        for stage in ("tiled", "flash2")   # those of naive and online_softmax are with the exercises
        for what, pattern, replacement in [
            ("scale missing", r"(\? |score\()p\.scale \* ", r"\1"),
            ("the wrong key head", r"h / \(p.H / p.H_kv\)", "h % p.H_kv"),
            ("L without the maximum", r"(m|m\[r(?:ow)?\]) \+ logf", "logf"),
            ("a row that sees no key", r"== -INFINITY \? 0.f : ", "== -INFINITY ? -INFINITY : "),
            ("0 / 0 for such a row", r"l(\[r\]|\[row\]|_new\[r\])? == 0.f", "false"),
        ]
    ),
    ("tiled", "the mask off by one", r"col <= row \+ p\.diagonal", "col < row + p.diagonal"),
    ("tiled", "the mask from the wrong corner", r"col <= row \+ p\.diagonal", "col <= row"),
    ("flash2", *OFF_BY_ONE),
    ("flash2", *WRONG_CORNER),
    ("online_softmax", "keys past the end", r"col < p\.N_k && \(", "("),
    ("flash2", *PAST_THE_END),
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
    ("flash2", *TILE_TOO_FEW),
    ("flash2", "maximum of the lane, not of the row", r"m_new = warp_max\(m_new\);", ""),
    *((stage, "V with the rows of K", r"p.V.stride_n", "p.K.stride_n") for stage in BY_NAME
      if stage not in BY_TMA),
    *((stage, "K with the rows of Q", r"p.K.stride_n", "p.Q.stride_n") for stage in BY_NAME
      if stage not in BY_TMA),
    *((stage, "O with the rows of V", r"p.O.stride_n", "p.V.stride_n") for stage in BY_NAME
      if stage not in STORED_BY_TMA),
    *((stage, "K in V's map", r"\(V_map, p\.V,", "(V_map, p.K,") for stage in BY_TMA),
    ("split_kv_wgmma", "V of Q's head", r"(V_smem\.fill.*), packed\.h_kv", r"\1, packed.head_of(0)"),
    ("split_kv_wgmma", "K of Q's head", r"(K_smem\.fill.*), packed\.h_kv", r"\1, packed.head_of(0)"),
    *((stage, "V of Q's head", r"(load_panels\(V_smem.*|V_smem\.fill.*), h_kv, b\)|V_head = h_kv",
       lambda m: f"{m[1]}, h, b)" if m[1] else "V_head = h") for stage in BY_TMA if stage not in PACKED_ROWS),
    *((stage, "K of Q's head", r"((load_panels\(K_smem|K_smem\.fill).*), h_kv, (b|at\.batch)\)",
       r"\1, h, \3)")
      for stage in BY_TMA if stage not in PACKED_ROWS),
    *((stage, "O of another head", r"work\.h, (work\.b|at\.batch)\)", r"(work.h + 1) % p.H, \1)")
      for stage in STORED_BY_TMA),
    ("naive", "O past its end", r"row >= p.N_q \|\| k >= d", "k >= d"),
    ("tiled", "O past its end", r"row < p.N_q && k < d", "k < d"),
    ("online_softmax", "O past its end", r"if \(row >= p.N_q\) continue;", ""),
    ("online_softmax", "workspace of half the size", r"return 2 \* sizeof", "return sizeof"),
    ("flash2", "O past its end", r"if \(row >= p.N_q\) continue;", ""),
    ("flash2", "O past its row", r"if \(k < d_v\) O", "O"),
    ("register_tiles", "maximum over 4 of a row's 8 lanes", r"warp_max\(m_new, 8\)", "warp_max(m_new, 4)"),
    ("register_tiles", "sum over 4 of a row's 8 lanes", r"warp_sum\(l_tile, 8\)", "warp_sum(l_tile, 4)"),
    ("register_tiles", "P not transposed", r"P_smem\[col_of\(c\) \* Br \+ row_of\(r\)\]",
     "P_smem[row_of(r) * Bc + col_of(c)]"),
    ("register_tiles", "a row of Q for each column", r"\+= a\[row\]", "+= a[col % R]"),
    ("vectorized", "fours of rows side by side", r"r / 4 \* 16 \+ r % 4", "r"),
    ("vectorized", "fours of keys 16 apart", r"key, (K_smem .*), 32\)", r"key, \1, 16)"),
    ("vectorized", "O past its row", r"if \(k >= d_v\) continue;", ""),
    ("vectorized", "rows past the end", r"first \+ pos\.x < N && ", ""),
    ("conflict_free", "maximum of the lane, not of the row", r"m_new = max_of_8\(m_new\);", ""),
    ("conflict_free", "the maximum over 8 neighbours", r"\{1, 4, 8\}\) x = fmaxf", "{1, 2, 4}) x = fmaxf"),
    ("conflict_free", "V in another order than P", r"col = 4 \* x \+ y % 4 \+ y / 4 \* 32",
     "col = 8 * y + x"),
    ("conflict_free", "P swizzled, and read as if it were not", r"16, P_swizzle\(x\)\)", "16)"),
    ("conflict_free", "K swizzled, and read as if it were not", r"first_col, 32, swizzle_of\(k\)",
     "first_col, 32"),
    ("prefetch", "the next tile of K too early", r"next_j \* Bc\);", "(next_j + 1) * Bc);"),
    ("prefetch", "the same tile of K again", r"K \+= .* \* p\.K\.stride_n;", ""),
    ("prefetch", "the next tile of V too early", r"(    load_tile4.*\n)([^}]*?)(    V \+= .*\n)", r"\3\1\2"),
    *(
        ("fp32_tuned", what, pattern, replacement)
        for what, pattern, replacement in [
            OFF_BY_ONE,
            WRONG_CORNER,
            ("scale missing", r"p.scale \* LOG2_E", "LOG2_E"),
            ("the wrong key head", r"h / \(p.H / p.H_kv\)", "h % p.H_kv"),
            ("L without the maximum", r"m\[r\] \+ log2f", "log2f"),
            ("L as a power of 2", r"LN_2 \* ", ""),
            ("a row that sees no key", r"== -INFINITY \? 0.f : ", "== -INFINITY ? -INFINITY : "),
            ("0 / 0 for such a row", r"l\[r\] == 0.f", "false"),
            PAST_THE_END,
            ("the erratum: diag(...)^-1", r"O_reg\[r\]\[c\] \*= alpha", "O_reg[r][c] /= alpha"),
            ("output not rescaled", r"O_reg\[r\]\[c\] \*= alpha", "O_reg[r][c] *= 1.f"),
            ("sum not rescaled", r"l\[r\] \*= alpha;", ""),
            TILE_TOO_FEW,
            ("a cut tile taken for a whole one", r"t >= tiles\.cut", "t > tiles.cut"),
            ("sum of the lane, not of the row", r"l\[r\] = sum_of_8\(l\[r\]\);", ""),
            ("O past its end", r"if \(row >= p.N_q\) continue;", ""),
            ("the tiles of a head in the place of heads", r"Tr - 1 - work\.tile : work\.tile, bh = work\.bh",
             "work.bh % Tr : work.bh % Tr, bh = work.tile"),
        ]
    ),
    *(
        (stage, what, pattern, replacement)
        for stage in ("wmma", "swizzle", "cp_async")   # mma is swizzle but for tile_index
        for what, pattern, replacement in [
            OFF_BY_ONE,
            WRONG_CORNER,
            ("scale missing", r"(\? |score\()p\.scale \* ", r"\1"),
            ("the wrong key head", r"h / \(p.H / p.H_kv\)", "h % p.H_kv"),
            ("L without the maximum", r"m(\[r\])? \+ logf", "logf"),
            ("a row that sees no key", r"== -INFINITY \? 0.f : ", "== -INFINITY ? -INFINITY : "),
            ("0 / 0 for such a row", r"inv_l = l(\[r\])? == 0.f", "inv_l = false"),
            PAST_THE_END,
            TILE_TOO_FEW,
            ("sum not rescaled", r"l(\[r\])? \*= alpha;", ""),
            ("rows past the end", r"first (\+ first_row )?\+ row < N", "true"),
        ]
    ),
    *(
        (stage, what, pattern, replacement)
        for stage in ("swizzle", "cp_async")
        for what, pattern, replacement in [
            ("the erratum: diag(...)^-1", r"x \*= alpha;", "x /= alpha;"),
            ("output not rescaled", r"x \*= alpha;", ""),
            ("maximum of the lane, not of the row", r"m_new = quad_max\(m_new\);", ""),
            ("sum of the lane, not of the row", r"l\[r\] = quad_sum\(l\[r\]\);", ""),
            ("O past its end", r"warp_row \+ row < p.N_q && col < d", "col < d"),
            ("two chunks in one place", r"\^ row % 8 \* 8", "| row % 8 * 8"),
        ]
    ),
    *(
        ("swizzle", what, pattern, replacement)
        for what, pattern, replacement in [
            ("the quarters of P in another order", r"A\[2 \* n\] = (.*;\n *)A\[2 \* n \+ 1\]",
             r"A[n] = \1A[n + 2]"),
            ("V not transposed", r"ldmatrix_x4_trans\(V", "ldmatrix_x4(V"),
            ("K's rows as V's", r"K_row = .*;", "K_row = lane % 16, K_col = lane / 16 * 8;"),
            ("the other row of the lane", r"lane_row \+ 8 \* r,", "lane_row + 8 * (1 - r),"),
        ]
    ),
    ("cp_async", "the same tile again", r"tiles\[t \+ 1\] \* Bc;", "j * Bc;"),
    ("cp_async", "a copy not waited for", r"    cp_async_wait<0>\(\);\n    __sync", "    __sync"),
    ("wmma", "the erratum: diag(...)^-1", r"alpha \* x\.", "1 / alpha * x."),
    ("wmma", "maximum of the lane, not of the row", r"fmaxf\(m_new, __shfl_xor.*\);", "m_new;"),
    ("wmma", "K not transposed", r"ELEMENT, wmma::col_major", "ELEMENT, wmma::row_major"),
    ("wmma", "O past its end", r"if \(row >= p.N_q\) return;", ""),
    ("wmma", "O not zero at the start", r"store4\(O_row \+ k, 0.f, 0.f, 0.f, 0.f\);", ";"),
    *(
        ("split_kv", what, pattern, replacement)
        for what, pattern, replacement in [
            ("the mask asked about a packed row", r"cut, G\)", "cut)"),
            ("tiles of Q counted in packed rows", r"key_tiles\(i / G\)", "key_tiles(i)"),
            ("ranges that overlap", r"part_of\((.*), split, p\.splits\)",
             r"part_of(\1, max(split - 1, 0), p.splits)"),
            ("a head's rows apart", r"head_of\(row\)\) \* p\.N_q \+ row / G",
             "h_kv * G + row / p.N_q) * p.N_q + row % p.N_q"),
            ("ranges with the same weight", r"fast_exp2\(LOG2_E \* \(L_s - m\)\)", "1.f"),
            ("the last range counted up to four times", r"s < p\.splits \? \*L_s : -INFINITY", "*L_s"),
            ("L without the maximum", r"m_row \+ logf\(l\)", "logf(l)"),
        ]
    ),
]
BACKWARD_MUTANTS = [
    *(
        (stage, what, pattern, replacement)
        for stage in ("recompute",)        # those of naive are with the exercises
        for what, pattern, replacement in [
            ("dO with the rows of Q", r"p\.dO\.stride_n", "p.Q.stride_n"),
            OFF_BY_ONE,
            ("D omitted", r" - D(_row)?\)", ")"),
            ("scale missing on dK", r"p\.scale \* (dk;|dK_reg)", r"\1"),
            ("scale missing on dQ", r"p\.scale \* (dq;|dQ_reg)", r"\1"),
            ("dL ignored", r"p\.dL\[\w+\]", "0.f"),
            ("the wrong heads of Q", r"h = h_kv \* group; h < .* h\+\+", "h = h_kv; h < p.H; h += p.H_kv"),
        ]
    ),
    ("naive", "a row that sees no key", r"== -INFINITY \? 0\.f : ", "== -INFINITY ? -INFINITY : "),
    ("naive", "a row too few", r"row < p\.N_q; row\+\+\) \{", "row < p.N_q - 1; row++) {"),
    ("naive", "dQ past its end", r"row >= p\.N_q \|\| k >= d", "k >= d"),
    ("naive", "workspace too small", r"p\.N_q \* p\.N_k;", "p.N_q * p.N_k - 1024;"),
    ("recompute", "dQ with the rows of dO", r"p\.dQ\.stride_n", "p.dO.stride_n"),
    ("recompute", "a head of the group missed", r"(h < \(h_kv \+ 1\) \* group);", r"\1 - 1;"),
    ("recompute", "V with the rows of K", r"p\.V\.stride_n", "p.K.stride_n"),
    ("recompute", "scale missing in S", r"x = p\.scale \* ", "x = "),
    ("recompute", "dL with the wrong sign", r"sum -= p\.dL", "sum += p.dL"),
    ("recompute", "O with the rows of dO", r"p\.O\.stride_n", "p.dO.stride_n"),
    ("recompute", "dL of a row that sees no key", r"p\.L\[\w+\] == -INFINITY \? 0\.f : sum", "sum"),
    ("recompute", "dQ not set to 0", r"if \(clear_dQ\) dQ\[k\] = 0\.f;", ""),
    ("recompute", "workspace too small", r"p\.B \* p\.H \* p\.N_q; \}", "p.B * p.N_q; }"),
    ("recompute", *PAST_THE_END),
    ("recompute", "L of the wrong head", r"p\.L\[first_row \+ row\]", "p.L[row]"),
    ("recompute", "L of the wrong row", r"p\.L\[first_row \+ row\]", "p.L[first_row + warp * rows + r]"),
    ("recompute", "causal: a tile of Q too few", r"(max\(rule\.first_row.* / BLOCK_R)", r"\1 + CAUSAL"),
    ("recompute", "P not transposed", r" P_smem\[row \* Bc \+ (.*?)\]", r" P_smem[(\1) * Bc + row]"),
    ("recompute", "Q in the place of dO", r"\* gradient;  // line 12", "* query;  // line 12"),
    ("recompute", "dQ of one block alone", r"atomicAdd\((dQ .*?), (.*)\);", r"*(\1) = \2;"),
    ("recompute", "dK past its end", r"if \(col >= p\.N_k\) continue;", ""),
    *(
        ("deterministic", f"{what}, for dQ", rf"(?s)(.*){pattern}", rf"\1{replacement}")  # the last one
        for what, pattern, replacement in [
            ("dO with the rows of Q", r"p\.dO\.stride_n", "p.Q.stride_n"),
            ("K with the rows of V", r"p\.K\.stride_n", "p.V.stride_n"),
            ("dQ with the rows of dO", r"p\.dQ\.stride_n", "p.dO.stride_n"),
            ("the mask off by one", r"mask\.sees\(row, col\)", "mask.sees(row, col + 1)"),
            ("the wrong key head", r"h / \(p\.H / p\.H_kv\)", "h % p.H_kv"),
            ("D omitted", r" - D_row\)", ")"),
            ("keys past the end", r"mask\.sees\(row, col\)", "mask.sees(row, min(col, p.N_k - 1))"),
            ("causal: a tile of keys too few", r"t < tiles\.end", "t < tiles.cut"),
            ("past its end", r"if \(row >= p\.N_q\) continue;", ""),
            ("past its row", r"if \(k < d\) dQ", "dQ"),
        ]
    ),
    ("register_tiles", "K not transposed", r"4 \* width, KT_smem, Bc", "4 * width, K_smem, width"),
    ("register_tiles", "other rows of Q", r"4 \* width, KT_smem", "width, KT_smem"),
    ("register_tiles", "keys of another lane", r"dK_row = (.*?) \+ lane / 8 \* 4", r"dK_row = \1 + lane / 8"),
    ("register_tiles", "columns one after the other", r"x / 4 \* step \+ x % 4", "x"),
    ("vectorized", "one step of four", r"four\[r\]\[e\]", "four[r][0]"),
    ("vectorized", "one column of dV twice", r"dV_reg\[r\]\[c \+ 1\]", "dV_reg[r][c]"),
    ("vectorized", "dS four keys further on", r"store4\(dS_smem \+ to,", "store4(dS_smem + (to ^ 4),"),
    ("conflict_free", "Q swizzled, and not swizzled back", r"4 \* odd, KT_smem", "0, KT_smem"),
    ("conflict_free", "V swizzled, and not swizzled back", r"VT_smem, Bc, 16", "VT_smem, Bc, 0"),
    ("conflict_free", "P swizzled, and not swizzled back", r"dK_row, 0, row % 2 \* 16", "dK_row, 0, 0"),
    ("conflict_free", "dS of even rows swizzled", r"4 \* Bc, 16 \* odd", "4 * Bc, 16 - 16 * odd"),
    *(
        ("fp32_tuned", what, pattern, replacement)
        for what, pattern, replacement in [
            ("dV with the rows of dK", r"p\.dV\.stride_n", "p.dK.stride_n"),
            ("the mask off by one", r"mask\.sees\(row, j", "mask.sees(row, 1 + j"),
            ("a tile on the diagonal not masked", r"mask\.cuts\(tiles, t, j\)", "(i + 1) * Br > p.N_q"),
            ("D omitted", r" - D_row\[r\]", ""),
            ("P to the base 2", r"LOG2_E \* \(", "("),
            ("L of the wrong head", r"p\.L\[first_row \+ row\]", "p.L[row]"),
            ("the next head too late", r"stage_tiles\(next_h,", "stage_tiles(h,"),
            ("the same tile again", r"next_h == h \? t \+ 1 :", "next_h == h ? t :"),
            ("K not swizzled", r"row % 2 \* 4\), x", "0), x"),
            ("dK past its end", r"if \(col >= p\.N_k\) continue;", ""),
        ]
    ),
    *(
        ("mma", what, pattern, replacement)
        for what, pattern, replacement in [
            ("V with the rows of K", r"p\.V\.stride_n", "p.K.stride_n"),
            ("dQ of the wrong rows", r"row % p\.N_q \* p\.dQ\.stride_n", "row % p.N_q * p.dO.stride_n"),
            ("the mask off by one", r"mask\.sees\(row, col\)", "mask.sees(row, col + 1)"),
            WRONG_CORNER,
            ("D omitted", r"\(dP - D_row\[r / 8\]\)", "dP"),
            ("L of the lane's first row", r"L_row\[r / 8\]", "L_row[0]"),
            ("dL ignored", r"p\.dL\[\w+\]", "0.f"),
            ("scale missing on dK", r"x \*= p\.scale", "x *= 1.f"),
            ("scale missing on dQ", r"ELEMENT\(p\.scale \* dQ", "ELEMENT(dQ"),
            ("P to the base 2", r"LOG2_E \* \(", "("),
            ("L of the wrong head", r"p\.L\[first_row \+ row\]", "p.L[row]"),
            ("the wrong heads of Q", r"h = h_kv \* group; h < .* h\+\+", "h = h_kv; h < p.H; h += p.H_kv"),
            ("dQ not zero at the start", r"dQ_accum\[t\] = 0\.f;", ";"),
            ("K not transposed", r"transposed\(K_smem,", "as_it_lies(K_smem,"),
            ("P not transposed", r"transposed\(P_smem, P_pitch, 0, ", "as_it_lies(P_smem, P_pitch, "),
            ("dK past its end", r"col < p\.N_k && k < d", "k < d"),
        ]
    ),
    ("transposed", "the quarters of P^T in another order", r"\[k / 16\]\[e\];",
     "[k / 16][e % 2 * 2 + e / 2];"),
    ("transposed", "dS as it was stored", r"transposed\(dST_smem, dST_pitch, 0, ",
     "as_it_lies(dST_smem, dST_pitch, "),
    ("transposed", "D of a key", r"dP - D_smem\[c\]", "dP - D_smem[r]"),
    ("split_warps", "dP of Q", r"makes_dV \? Q_smem : dO_smem", "Q_smem"),
    ("split_warps", "scale missing on dK", r"makes_dV \? 1\.f : p\.scale", "1.f"),
    ("split_warps", "dS of other queries", r"first_key \+ row, col, PT", "first_key + row, col ^ 8, PT"),
    ("cp_async", "a copy not waited for", r"      cp_async_wait<0>\(\);\n", ""),
    ("cp_async", "L of the wrong head", r"\(\(\(int64_t\)b \* p\.H \+ h\) \* Tr \+ i\)",
     "((int64_t)b * Tr + i)"),
    ("cp_async", "dO with the rows of Q", r"\(b, h\), p\.dO\.stride_n", "(b, h), p.Q.stride_n"),
    ("cp_async", "a row that sees no key", r"== -INFINITY \? 0\.f : to", "== -INFINITY ? -INFINITY : to"),
    ("cp_async", "half of dQ not zero at the start", r"e < 2; e\+\+\)\n( *reinterpret_cast<float4\*>\(to)",
     r"e < 1; e++)\n\1"),
    ("late_dq", "the last dQ forgotten", r"add_dQ\(h, tiles\[tiles\.end - 1\], tiles\.end - 1\)", ""),
    ("late_dq", "dQ of the wrong tile", r"add_dQ\(h, tiles\[t - 1\], t - 1\)", "add_dQ(h, i, t - 1)"),
    ("late_dq", "scale missing on dQ", r"sum\[half\], p\.scale\)", "sum[half], 1.f)"),
    ("late_dq", "numbers of the wrong lane", r"16 \* in_fragment", "8 * in_fragment"),
    ("split_heads", "the wrong key head", r"h / \(p\.H / p\.H_kv\)", "h % p.H_kv"),
    ("split_heads", "the wrong heads of dK", r"tile \* each, \(tile \+ 1\) \* each - 1",
     "tile, tile + each - 1"),
    ("split_heads", "scale missing on the sum of dK", r"dropout_scale\(p\) : p\.scale",
     "dropout_scale(p) : 1.f"),
    ("split_heads", "dV over dK", r"\(\(makes_dV \? p\.B \* p\.H : 0\) \+ bh\)", "bh"),
    ("ordered_dq", "tiles of another launch", r"first_j \+ blockIdx\.x % launched",
     "blockIdx.x % launched + 1"),
    *(
        ("ampere_tuned", what, pattern, replacement)
        for what, pattern, replacement in [
            ("dO with the rows of Q", r"\(b, h\), p\.dO\.stride_n", "(b, h), p.Q.stride_n"),
            ("V with the rows of K", r"p\.V\.stride_n", "p.K.stride_n"),
            ("the mask off by one", r"first_key \+ row, side\)", "first_key + row + 1, side)"),
            ("a masked tile taken for a whole one", r"!mask\.cuts\(tiles, t, j, side\)",
             "(i + 1) * Br <= p.N_q"),
            ("a ragged tile not masked", r"end_col > N_k \|\| (end_col > rule.*?) \|\|", r"CAUSAL && \1 ||"),
            ("D omitted", r"dropout_scale\(p\) \* x - D_row\.x", "x"),
            ("dL ignored", r"p\.dL\[.*?\];", "0.f;"),
            ("scale missing on dK", r"makes_dV \? dropout_scale\(p\) : p\.scale", "1.f"),
            ("scale missing on dQ", r"sum\[half\], p\.scale\)", "sum[half], 1.f)"),
            ("the last dQ forgotten", r"add_dQ\(tiles\.end - 1\)", ""),
            ("a copy not waited for", r"    cp_async_wait<0>\(\);\n", ""),
            ("a tile of Q too few", r"(max\(rule\.first_row.* / BLOCK_R)", r"\1 + CAUSAL"),
            ("dK past its end", r"j \* Bc \+ row < p\.N_k && ", ""),
        ]
    ),
]
CASES = [   # of a d for which other tests build most of the stages, too
    (1, 2, 1, 70, 75, 40, "bottom"),
    (1, 4, 2, 100, 40, 40, "bottom"),
    (1, 2, 2, 45, 70, 40, "top"),
    (1, 1, 1, 64, 77, 40, None),
]


def check_forward(path, q, k, v, diagonal) -> None:
    with poisoned():
        o, lse = plan.forward(q, k, v, diagonal, None, *plan.choose(path, q))
    check(o, lse, q, k, v, diagonal)


def check_backward(path, q, k, v, diagonal) -> None:
    """From dO with gaps, and a dL that is infinite where L is."""
    o, lse = reference(q.double(), k.double(), v.double(), diagonal)
    o, lse = o.to(q.dtype), lse.float()
    # the default tiles for 16 bits are larger than the cases: none would be whole
    size = 64 if "needs:   sm_90a" in path.read_text() else 32     # rows of a warpgroup
    one_size = q.dtype == torch.float32 or flash.read_stage(path).name in SIDE_BRANCH
    tiles = {} if one_size else {"Br": size, "Bc": size}
    do, dlse = random_gradients(q)
    dlse[lse == -torch.inf] = -torch.inf
    with poisoned():
        gradients = plan.backward(q, k, v, o, lse, with_gaps(do, 4), dlse, diagonal, None,
                                    *plan.choose(path, q, "bwd", **tiles), False)
    check_gradients(gradients, q, k, v, do, diagonal, None, dlse)


def tensors_of(direction: str, dtype: torch.dtype) -> list:
    """The arguments of check_forward and check_backward: q, k, v, diagonal."""
    cases = [(*random_qkv(*shape, "cpu", dtype), {None: None, "top": 0, "bottom": shape[4] - shape[3]}[mask])
             for *shape, mask in CASES]
    q, k, v, diagonal = qkv_with_gaps("cpu", dtype, CASES[0][5])
    if direction == "bwd":
        k = k.transpose(1, 2).contiguous().transpose(1, 2)  # so that dK is laid out otherwise than dV
        a, b, c, _ = cases[-1]
        cases.append((a + 5, b - 5, c, None))  # L below -88: a key past the end, a score of 0, is infinite
    return [(q, k, v, diagonal), *cases]


def survives(path, seeds=("",), cases=None) -> bool:
    """Whether a stage passes all cases, or these, under the default schedule ("") and random ones."""
    stage = flash.read_stage(path)
    check_one = {"fwd": check_forward, "bwd": check_backward}[stage.direction]
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            if seed:
                patch.setenv("FLASH_SIM_SEED", seed)
            for tensors in cases or tensors_of(stage.direction, stage.dtypes[0]):
                try:
                    check_one(path, *tensors)
                except (AssertionError, RuntimeError) as error:
                    assert "building" not in str(error), error
                    return False
    return True


ALL_MUTANTS = [*((BY_NAME[stage], *rest) for stage, *rest in MUTANTS),
               *((BACKWARD[stage], *rest) for stage, *rest in BACKWARD_MUTANTS)]
EVERY = bool(os.environ.get("FLASH_ALL_MUTANTS"))
# At the ends of the ladder's branches one of three; in between one of twelve
SOME_MUTANTS = [m for n, m in enumerate(ALL_MUTANTS) if EVERY or n % (3 if is_end(m[0]) else 12) == 0]


@pytest.mark.parametrize("stage", dict.fromkeys(stage for stage, *_ in SOME_MUTANTS), ids=name_of)
def test_without_a_mutation(stage):
    assert survives(stage.path, ("", "1"))


def with_common(stage) -> str:
    """A stage's text, with what it includes of stages/common in place: to be broken, too."""
    text = stage.path.read_text()
    return inlined(text, *re.findall(r'#include "common/(.*)"', text))


@pytest.mark.parametrize(
    "stage, what, pattern, replacement", SOME_MUTANTS, ids=[f"{name_of(m[0])}-{m[1]}" for m in SOME_MUTANTS]
)
def test_mutant_is_caught(stage, what, pattern, replacement, tmp_path):
    text, count = re.subn(pattern, replacement, with_common(stage))
    assert count, f"{pattern} is not in {stage} any more"
    mutant = tmp_path / f"{stage.name}.cuh"
    mutant.write_text(text)
    assert not survives(mutant), what


def test_every_mutation_is_of_its_stage():
    """Also those that do not run here."""
    for stage, _, pattern, _ in ALL_MUTANTS:
        assert re.search(pattern, with_common(stage)), (stage, pattern)


# That a result shows it; results/cpu/mutants.json says of each how it was found. Those of Hopper's stages
# change no result in the simulator.
BARRIERS = [(name, n) for name, s in BY_NAME.items() if name not in BY_TMA and (EVERY or is_end(s))
            for n in range(s.path.read_text().count("__syncthreads();"))]


@pytest.mark.parametrize("stage, number", BARRIERS)
def test_missing_barrier_is_caught(stage, number, tmp_path):
    # several tiles a block
    text = re.sub(r"// splits: .*(\n// {9}.*)*", "", BY_NAME[stage].path.read_text())
    parts = text.split("__syncthreads();")
    mutant = tmp_path / f"{stage}.cuh"
    mutant.write_text(
        "__syncthreads();".join(parts[: number + 1])
        + "__syncthreads();".join(["", *parts[number + 1 :]])[16:]
    )
    assert mutant.read_text().count("__syncthreads();") == len(parts) - 2
    seeds = "", *map(str, range(1, 6))
    wide = *random_qkv(1, 1, 1, 40, 200, 136, "cpu", BY_NAME[stage].dtypes[0]), None
    assert not survives(mutant, seeds) or not survives(mutant, seeds, [wide])  # some are for d > 128


# ------------------------------------------------------------------------------------------ made mechanically
DATA = json.loads((flash.ROOT / "results" / "cpu" / "mutants.json").read_text())
ROWS = {mutants.name_of(row): row for row in DATA["mutants"]}
EQUIVALENT, MISSED = mutants.reasons(mutants.EQUIVALENT), mutants.reasons(mutants.MISSED)
SAMPLE = {"fwd_13_cp_async": 8, "bwd_11_cp_async": 16}      # every so many of a stage's own


@pytest.mark.parametrize("code", ["do { x(); } while (y(1)); z();", "do x(); while (y(1)); z();",
                                  "for (;;) { x(); } z();", "if (y) x(); else { w(); } z();"])
def test_where_a_statement_ends(code):
    """There the next one is put ahead of it: a `do` ends after its `while`."""
    assert code[mutation.statement_end(code, 0):] == " z();"


def test_the_mutants_are_those_of_the_stages():
    """results/cpu/mutants.json has a row for each mutant, and no other; else, and if a stage has changed in
    another way: python results/mutants.py results/cpu --stages NAME."""
    assert set(ROWS) == {mutant.name for stage in STAGES for mutant in mutants.mutants(stage).values()}
    assert set(DATA["stages"]) == {stage.path.stem for stage in STAGES}
    changed = DATA | {"stages": DATA["stages"] | {"fwd_01_naive": "another hash"}}
    assert set(mutants.stale(changed)) == {"fwd_01_naive", *mutants.stale(DATA)}
    if names := mutants.stale(DATA):
        warnings.warn(f"results/cpu/mutants.json is older than {', '.join(names)}", stacklevel=1)


def test_every_mutant_is_found_or_has_a_reason():
    """Equivalent mutants and those that are missed are listed, with a reason, and nothing else is."""
    assert not set(EQUIVALENT) & set(MISSED)
    listed = EQUIVALENT | MISSED
    assert set(listed) == {name for name, row in ROWS.items() if not row["how"]}
    assert all(listed.values())


@pytest.mark.parametrize("stage", STAGES if EVERY else
                         [stage for stage in STAGES if stage.path.stem in SAMPLE], ids=name_of)
def test_mutants_are_found(stage):
    """Those of the file alone: as they were when results/cpu/mutants.json was written."""
    own = {number: mutant for number, mutant in mutants.mutants(stage).items()
           if mutant.file == stage.path.name}
    if not EVERY:
        own = dict(list(own.items())[::SAMPLE[stage.path.stem]])
    (_, without), *rest = mutants.verdicts(stage, [0, *own])
    assert not without and len(rest) == len(own)
    missed = {own[number].name for number, how in rest if not how}
    assert missed == {mutant.name for mutant in own.values() if not ROWS[mutant.name]["how"]}


def test_the_table_of_mutants():
    """Each is of one kind; and the table's numbers add up."""
    for stage in STAGES:
        for mutant in mutants.mutants(stage).values():
            assert len([kind for kind in mutants.KINDS.values() if re.fullmatch(kind, mutant.change)]) == 1
    made = mutants.table(DATA)
    *rows, total = [[int(cell) for cell in line.split("|")[2:-1]] for line in made.splitlines()[2:-2]]
    assert total == [sum(column) for column in zip(*rows)] and total[0] == len(ROWS) == sum(total[1:])


def test_how_mutants_are_made(tmp_path):
    """Of each kind, in a small file: a barrier between statements, a wait, bounds; none of the host's."""
    file = tmp_path / "some.cuh"
    file.write_text(EXAMPLE)
    source = mutation.Source(file, 1, tmp_path)
    assert [(m.line, m.change) for m in source.mutants] == [
        (4, "__syncthreads removed"), (4, "__syncthreads a statement later"),
        (4, "__syncthreads a statement earlier"),
        (6, "cp_async_wait<0> removed"), (6, "cp_async_wait<0> a statement earlier"),
        (6, "cp_async_wait<0> for one group less"),
        (5, "< + 1"), (5, "< - 1"), (5, "min + 1"), (5, "min - 1"), (5, "<= + 1"), (5, "<= - 1")]
    assert source.mutated().count("\n") == EXAMPLE.count("\n")
    lines = source.mutated().splitlines()
    assert lines[2].startswith("  if (MUTANT(3)) __syncthreads(); tile[t]")
    assert lines[3] == "  { if (!MUTANT(1) && !MUTANT(2) && !MUTANT(3)) __syncthreads(); }  // all"
    assert lines[4].strip() == (
        "if (MUTANT(5)) cp_async_wait<0>(); for (int k = 0; k < MUTANT(7) - MUTANT(8) + "
        "min(MUTANT(9) - MUTANT(10) + t, 3); k++) if (t <= MUTANT(11) - MUTANT(12) + n) { x++; } "
        "if (MUTANT(2)) __syncthreads();")
    assert "else if (MUTANT(6)) cp_async_wait<0 + 1>();" in lines[5]


def test_mutants_of_hoppers_instructions(tmp_path):
    """Waits, commits, arrivals and fences, whatever their arguments are."""
    file = tmp_path / "some.cuh"
    file.write_text(HOPPER)
    source = mutation.Source(file, 1, tmp_path)
    bounds = (" + 1", " - 1")
    assert [(m.line, m.change) for m in source.mutants if not m.change.endswith(bounds)] == [
        (2, "mbarrier_arrive_expect removed"), (2, "mbarrier_arrive_expect of 16 bytes more"),
        (2, "mbarrier_arrive_expect of 16 bytes less"), (3, "mbarrier_wait removed"),
        (3, "mbarrier_wait a statement later"), (3, "mbarrier_wait a statement earlier"),
        (3, "mbarrier_wait of the other parity"), (4, "wgmma_fence removed"),
        (4, "wgmma_fence a statement later"), (4, "wgmma_fence a statement earlier"),
        (6, "wgmma_commit removed"), (6, "wgmma_commit a statement later"),
        (6, "wgmma_commit a statement earlier"), (7, "wgmma_wait<1> removed"),
        (7, "wgmma_wait<1> a statement later"), (7, "wgmma_wait<1> a statement earlier"),
        (7, "wgmma_wait<1> for one group less"), (8, "mbarrier_arrive removed"),
        (9, "named_barrier_sync removed"), (9, "named_barrier_sync a statement later"),
        (9, "named_barrier_sync a statement earlier"), (9, "named_barrier_sync of the number after"),
        (9, "named_barrier_sync of a warp more"), (9, "named_barrier_sync of a warp less"),
        (11, "mbarrier_wait removed"), (11, "mbarrier_wait of the other parity"),
        (12, "mbarrier_wait removed"), (12, "mbarrier_wait a statement earlier"),
        (12, "mbarrier_wait of the other parity"),
        (13, "wait_until_full removed"), (13, "wait_until_full a statement later"),
        (13, "wait_until_full a statement earlier"), (13, "wait_until_full of the step after"),
        (13, "wait_until_full of the step before"), (14, "end removed"), (14, "end a statement earlier"),
        (15, "fill removed"), (15, "fill a statement earlier"), (15, "fill of the step after"),
        (15, "fill of the step before"), (16, "fill removed"), (16, "fill a statement earlier"),
        (16, "fill of the step after"), (16, "fill of the step before")]
    for mutant in source.mutants:
        assert len([kind for kind in mutants.KINDS.values() if re.fullmatch(kind, mutant.change)]) == 1
    lines = source.mutated().splitlines()
    assert "wgmma_wait<1 + 1>();" in lines[6]
    assert "(full + t % 2, 2 * (t ? sizeof(float) * (t + 1) : 0) + 16);" in lines[1]
    assert "mbarrier_wait(full + t % 2, ((t / 2 + 1) % 2) ^ 1);" in lines[2]
    assert "named_barrier_sync(1 + 1, 128);" in lines[8] and "named_barrier_sync(1, 128 - 32);" in lines[8]
    fill = "ring.fill(map, %s, tiles[t] * 8)"
    assert lines[14].endswith(f"{fill % 't + 1 + 1'}; else if (MUTANT(40)) {fill % 't + 1 - 1'}; return; }}")
    assert "fill(ring, map, t + 1, tiles[t] * 8);" in lines[15]
    assert not mutation.Source(flash.STAGES / "common" / "hopper.cuh", 1).mutants


HOPPER = """\
__global__ void kernel(uint64_t* full, float (&D)[2][4], uint64_t A, int t) {
  if (t == 0) mbarrier_arrive_expect(full + t % 2, 2 * (t ? sizeof(float) * (t + 1) : 0));
  mbarrier_wait(full + t % 2, (t / 2 + 1) % 2);
  wgmma_fence();
  wgmma(D, A, A);
  wgmma_commit();
  wgmma_wait<1>();
  if (t == 0) mbarrier_arrive(full);
  named_barrier_sync(1, 128);
  const int s = t % 2, parity = t / 2 % 2;
  if (t > 0) { const int other = 1 - s; mbarrier_wait(full + other, parity); }
  if (t == 0) { const int other = 1 - s; mbarrier_wait(full + s, parity); }
  ring.wait_until_full(t);
  turns.end();
  return ring.fill(map, t + 1, tiles[t] * 8);
  fill(ring, map, t, tiles[t] * 8);
}
"""


def test_what_synchronises_is_known():
    """Each such function of stages/common is changed where it is called."""
    common = flash.STAGES / "common"
    files = ("ptx.cuh", "hopper.cuh", "cluster.cuh", "ring.cuh", "turns.cuh")
    text = "".join((common / file).read_text() for file in files)
    names = re.findall(r"__device__ (?:__forceinline__ )?void (\w+)\(", text)
    others = re.compile(r"setmaxnreg|ldmatrix|stmatrix|mma_|cp_async_16|tma_|bulk_add|bulk_store|bulk_load|"
                        r"bulk_send|prefetch_map|start_next_kernel|init$")
    for name in names:
        if not others.match(name) or name == "mbarrier_init":
            assert mutation.SYNC.search(f"{name}();") or mutation.SYNC.search(f"{name}<0>();"), name
    assert {"mbarrier_wait", "cluster_sync", "wait_until_empty", "end_all", "cp_async_wait"} <= set(names)

EXAMPLE = """\
__global__ void kernel(float* tile, int n) {
  const int t = threadIdx.x; clear<4 <= 8>(tile);
  tile[t] = 0.f;
  __syncthreads();  // all
  for (int k = 0; k < min(t, 3); k++) if (t <= n) { x++; }
  cp_async_wait<0>();
}
void launch(int n) {
  if (n < 3) kernel<<<1, 32>>>(nullptr, n);
}
"""
