"""Exercises over the backward stages in fp32: lesson 05."""

from ..cases import CAUSAL_SCORE
from ..exercise import Exercise
from ..probes import Probe
from .forward import wrong

# As if the batch element were a later one of a large call, so that its first element of P is past 2^31.
LARGE_P = Probe(
    "const int b = bh / p.H_kv, h_kv = bh % p.H_kv, group = p.H / p.H_kv;",
    """
const int64_t before = ((int64_t)1 << 31) / ((int64_t)p.H * p.N_q * p.N_k) + 1, a_batch = before * p.H *
p.N_q; const int b = bh / p.H_kv + int(before), h_kv = bh % p.H_kv, group = p.H / p.H_kv;
P -= a_batch * p.N_k; dS -= a_batch * p.N_k; p.Q.data -= before * p.Q.stride_b;
p.dO.data -= before * p.dO.stride_b; p.dK.data -= before * p.dK.stride_b; p.dV.data -= before * p.dV.stride_b;
""",
    "All results are right, but the index of P and dS overflows: an int ends at 2^31, and a large P has more "
    "elements. ((b * H + h) * N_q + row) * N_k + col must be made in int64_t from its first product on, as "
    "by "
    "(int64_t)b. The check took a small P for the end of a large one.")

EXERCISES = [
    Exercise(
        number=7, name="dS", title="Back through the softmax", lesson="05", direction="bwd", stage="naive",
        sections=("D, P and dS of the row",),
        specification="""
Each thread of softmax_kernel has one row of S, of p.N_k numbers, and the same row of dP. It has just made m
and l; `shift` is m, or 0 for a row that sees no key. Now put P in the place of S, and dS in the place of
dP:

  P_j = e^(S_j - m) / l      D = P_0 dP_0 + P_1 dP_1 + ... - dL      dS_j = P_j (dP_j - D)

dL, the gradient by the row's L, is p.dL[row]. p.dL is null if the loss does not depend on L; dL is then 0.

A row that sees no key has l = 0: its P and dS are 0, whatever p.dL has there, even infinity.
""",
        hints=(
            "D is a sum over the whole row. Which of the three must be complete before the first dS is "
            "made?",
            "Two loops over the row: the first makes P and sums up D, the second makes dS.",
            "Let D begin with -p.dL[row] if p.dL is not null and l > 0, else with 0."),
        mutants=(
            wrong("dL left out", r"^wrong result.*dL is left out",
                  ("D_row = p.dL && l > 0.f ? -p.dL[row] : 0.f;", "D_row = 0.f;")),
            wrong("dL added", r"^wrong result.*dL has the wrong sign", ("? -p.dL[row]", "? p.dL[row]")),
            wrong("dP without D", r"^wrong result.*D is left out",
                  ("(dP_row[col] - D_row);", "dP_row[col];")),
            wrong("one loop", r"^wrong result.*before its sum is complete",
                  ("    D_row += P * dP_row[col];\n  }\n  for (int col = 0; col < p.N_k; col++) dP_row",
                   "    D_row += P * dP_row[col];\n    dP_row"),
                  ("(dP_row[col] - D_row);", "(dP_row[col] - D_row);\n  }")),
            wrong("P not stored", r"^wrong result.*dV is made of S",
                  ("    S_row[col] = P;\n", ""),
                  ("dP_row[col] = S_row[col] * (dP_row[col] - D_row);",
                   "dP_row[col] = (l == 0.f ? 0.f : expf(S_row[col] - shift) / l) * (dP_row[col] - D_row"
                   ");")),
            wrong("an infinite dL in a row that sees no key", r"^wrong result.*dL is used in a row that "
                                                              r"sees no key",
                  ("p.dL && l > 0.f ? -p.dL[row]", "p.dL ? -p.dL[row]"), right_on_randn=True),
            wrong("dL where there is none", r"^out of bounds.*p.dL is null in this call",
                  ("p.dL && l > 0.f ? -p.dL[row]", "l > 0.f ? -p.dL[row]"), right_on_randn=True),
            wrong("a maximum of 0 taken for no key", r"^wrong result.*maximum of 0 is taken for .sees no key",
                  ("const float P = l == 0.f ? 0.f", "const float P = shift == 0.f ? 0.f"),
                  right_on_randn=True),
            wrong("a quotient of exponentials", r"^wrong result.*subtract in the exponent",
                  ("expf(S_row[col] - shift) / l", "expf(S_row[col]) / (l * expf(shift))"),
                  right_on_randn=True),
            wrong("0 / 0", r"^wrong result.*P is 0 / 0",
                  ("const float P = l == 0.f ? 0.f : expf", "const float P = expf")),
        )),
    Exercise(
        number=8, name="group", title="A key head for several query heads", lesson="05", direction="bwd",
        stage="naive", sections=("dK and dV of one key",), probes=(LARGE_P,), at_most={"hbm": 1.05},
        specification="""
Each thread of dKV_kernel makes dK[col][k] and dV[col][k] of batch element b and key head h_kv, and writes
them once. `group` query heads, neighbours, read this key head: each of their rows adds to both. For one
query head

  dV = P^T dO      dK = scale * dS^T Q

where P and dS are (B * H, N_q, N_k), contiguous, with 0 where a query does not see a key.

Given: b, h_kv, group, col, k; p.Q.head(b, h) and p.dO.head(b, h) point to the (N_q, d) matrices of query
head h, whose rows are p.Q.stride_n and p.dO.stride_n apart; dK and dV are those of this key head, with
strides of their own. Write both once: the check counts HBM traffic. The index of P and dS can pass 2^31.
""",
        hints=(
            "With H = 6 and H_kv = 2, group is 3: key head 0 has the query heads 0, 1, 2, and key head 1 "
            "has 3, 4, 5.",
            "Two loops: over those heads, and over all N_q rows of each. A transpose is only a matter of "
            "which index the sum runs over.",
            "Row `row` of head h of P begins at ((int64_t)b * p.H + h) * p.N_q + row times p.N_k.",
            "Which of dK and dV gets the scale? S = scale * Q K^T has it, O = P V has not."),
        mutants=(
            wrong("one query head", r"^wrong result.*the first query head of a group only",
                  ("h < (h_kv + 1) * group; h++", "h < h_kv * group + 1; h++")),
            wrong("every H_kv-th head", r"^wrong result.*heads of a group are neighbours",
                  ("for (int h = h_kv * group; h < (h_kv + 1) * group; h++)",
                   "for (int h = h_kv; h < p.H; h += p.H_kv)")),
            wrong("a sum for each head", r"^wrong result.*the last query head of a group only",
                  ("    const float* Q = p.Q.head(b, h);\n    const float* dO = p.dO.head(b, h);\n"
                   "    const int64_t first_row",
                   "    dk = dv = 0.f;\n    const float* Q = p.Q.head(b, h);\n"
                   "    const float* dO = p.dO.head(b, h);\n    const int64_t first_row")),
            wrong("dK without the scale", r"^wrong result.*dK lacks the scale", ("= p.scale * dk;", "= dk;")),
            wrong("dV with the scale", r"^wrong result.*dV is scaled", ("= dv;", "= p.scale * dv;")),
            wrong("not transposed", r"^wrong result.*not transposed",
                  ("(first_row + row) * p.N_k + col;", "(first_row + col) * p.N_k + row;")),
            wrong("an index of 32 bits", r"^wrong result.*index of P and dS overflows.*int64_t",
                  ("const int64_t first_row = ((int64_t)b * p.H + h) * p.N_q;",
                   "const int first_row = (b * p.H + h) * p.N_q;"),
                  ("const int64_t index = (first_row + row) * p.N_k + col;\n      dk",
                   "const int index = (first_row + row) * p.N_k + col;\n      dk"), right_on_randn=True),
            wrong("rows d apart", r"^out of bounds.* Q\[.*stride_n",
                  ("dS[index] * Q[row * p.Q.stride_n + k]", "dS[index] * Q[row * d + k]"),
                  right_on_randn=True),
            wrong("sums in HBM", r"^too much traffic.*excess is of d[KV]",
                  ("      dk += dS[index]", "      dK[col * p.dK.stride_n + k] = p.scale * dk;\n"
                   "      dV[col * p.dV.stride_n + k] = dv;\n      dk += dS[index]"), right_on_randn=True),
            wrong("the batch element left out", r"^wrong result.*batch 1",
                  ("const int64_t first_row = ((int64_t)b * p.H + h) * p.N_q;",
                   "const int64_t first_row = (int64_t)h * p.N_q;")),
        )),
    Exercise(
        number=9, name="recompute", title="P once more, from L", lesson="05", direction="bwd",
        stage="recompute", sections=("P and dS of the tile",), tiles={"Br": 32, "Bc": 64},
        score=("hbm", "wavefronts"),
        specification="""
The forward pass kept L, one number for a row, and no P. S_reg and dP_reg hold this warp's part of the tiles
Q_i K_j^T, not scaled and not masked, and dO_i V_j^T. Make of them (FlashAttention-2, Algorithm 2, lines 11
and 14)

  P = e^(scale * Q K^T - L)      dS = P (dP - D)

and put both into shared memory, where all warps will read them: P_smem and dS_smem, each Br x Bc.

Given: S_reg[r][c] and dP_reg[r][c] belong to row warp * rows + r, column lane + 32 * c of the tile; p.L and
D are (B, H, N_q), contiguous, and this head's begin at first_row. D is rowsum(dO * O) - dL already.

P and dS are 0 where the query does not see the key. mask.sees(row, col) says whether it does, by the row
and column in the whole matrix (stages/common/mask.cuh); it is false past N_q and N_k. L and D have N_q rows
for a head, not Tr * Br: do not read past them. L is -inf for a row that sees no key.

(The stage also asks mask.score and mask.through_score, for masks that change scores. Here you may leave them
out.)
""",
        hints=(
            "No maximum and no sum is needed: what they were for is in L.",
            "For each row r read L and D once, before the loop over c. Row warp * rows + r of the tile is "
            "row i * Br + warp * rows + r of the head.",
            "Ask the mask first, and take expf only where the key is seen: with L = -inf, expf(S - L) is "
            "infinite."),
        mutants=(
            wrong("S not scaled", r"^wrong result.*P lacks the scale",
                  ("const float x = p.scale * S_reg[r][c];", "const float x = S_reg[r][c];")),
            wrong("without L", r"^wrong result.*P lacks L",
                  ("expf(mask.score(x, row, col) - L_row)", "expf(mask.score(x, row, col))")),
            wrong("dP without D", r"^wrong result.*D is left out",
                  ("* dP_reg[r][c] - D_row);", "* dP_reg[r][c]);")),
            wrong("dS scaled", r"^wrong result.*dQ and dK are scaled twice",
                  ("= P * (mask.keep", "= p.scale * P * (mask.keep")),
            wrong("the mask off by one", r"^wrong result.*mask is off by one.*one key too few",
                  ("mask.sees(row, col) ?",
                   "row < p.N_q && col < p.N_k && (!CAUSAL || col < row + p.diagonal) ?")),
            wrong("0 taken for masked", r"^wrong result.*score or a maximum of 0 is taken for",
                  ("mask.sees(row, col) ?", "mask.sees(row, col) && S_reg[r][c] != 0.f ?"),
                  right_on_randn=True),
            wrong("a quotient of exponentials", r"^wrong result.*subtract in the exponent",
                  ("expf(mask.score(x, row, col) - L_row)", "expf(x) / expf(L_row)"),
                  right_on_randn=True),
            wrong("a large negative score", r"^wrong result.*even with a score such as -1e9",
                  ("mask.sees(row, col) ? expf(mask.score(x, row, col) - L_row) : 0.f",
                   "expf((mask.sees(row, col) ? x : -1e9f) - L_row)"),
                  right_on_randn=True),
            wrong("the mask by the tile's rows", r"^wrong result.*row and column within the tile",
                  ("= mask.sees(row, col)", "= mask.sees(warp * rows + r, lane + 32 * c)")),
            wrong("L past the end", r"^out of bounds.* L\[",
                  ("const float L_row = row < p.N_q ? p.L[first_row + row] : 0.f;",
                   "const float L_row = p.L[first_row + row];")),
            wrong("a column a lane", r"^(uninitialised|race).*dS_smem",
                  ("dS_smem[(warp * rows + r) * Bc + lane + 32 * c] = mask",
                   "dS_smem[(warp * rows + r) * Bc + lane] = mask")),
        )),
    Exercise(
        number=10, name="dQ", title="A sum that many blocks make", lesson="05", direction="bwd",
        stage="recompute", sections=("the tile's part of dQ",), tiles={"Br": 32, "Bc": 64},
        score=("hbm", "wavefronts"), at_most={"hbm": 1.05},
        specification="""
This block has a tile of keys, and each row of dQ is a sum over all keys: so every block adds its part to
the rows of dQ in HBM, while others add theirs (FlashAttention-2, Algorithm 2, line 15). The part of this
block is scale * dS_ij K_j. dQ was set to 0 before.

Given: dS_smem is Br x Bc; K_smem is Bc x d, with rows d + 1 apart. This warp has the rows warp * rows to
warp * rows + rows - 1 of the tile, its lane the columns lane, lane + 32, ... (`dims` of them), as with O in
flash2: sum up in registers, then add to HBM once. Row n of this head's dQ begins at dQ + n * p.dQ.stride_n.

Rows from N_q on and columns from d on do not exist, neither in K_smem (d may be 40) nor in dQ.
""",
        hints=(
            "The product is that of P V in flash2, with dS for P and K for V.",
            "a += b is a load, an addition and a store: what another block adds in between is lost.",
            "atomicAdd(address, value) adds as one step."),
        mutants=(
            wrong("no atomic", r"^race.* dQ\[",
                  ("atomicAdd(dQ + row * p.dQ.stride_n + k, p.scale * dQ_reg[r][c]);",
                   "dQ[row * p.dQ.stride_n + k] += p.scale * dQ_reg[r][c];")),
            wrong("stored, not added", r"^race.* dQ\[",
                  ("atomicAdd(dQ + row * p.dQ.stride_n + k, p.scale * dQ_reg[r][c]);",
                   "dQ[row * p.dQ.stride_n + k] = p.scale * dQ_reg[r][c];")),
            wrong("no scale", r"^wrong result.*dQ lacks the scale", ("+ k, p.scale * dQ_reg", "+ k, dQ_reg")),
            wrong("P for dS", r"^wrong result.*dQ is made of P",
                  ("dQ_reg[r][c] += dS_smem[", "dQ_reg[r][c] += P_smem[")),
            wrong("rows of K d apart", r"^uninitialised.*K_smem",
                  ("K_smem[col * (d + 1) + lane + 32 * c] : 0.f;", "K_smem[col * d + lane + 32 * c] : 0.f;")),
            wrong("rows past the end", r"^(out of bounds|race)",
                  ("        if (row >= p.N_q) continue;\n", "")),
            wrong("columns from d on", r"^(out of bounds|race)", ("if (k < d) atomicAdd", "atomicAdd")),
            wrong("two additions for each tile", r"^too much traffic.*excess is of dQ.*atomicAdd",
                  ("      for (int col = 0; col < Bc; col++) {\n        for (int c = 0; c < dims; c++) {\n"
                   "          const float key",
                   "      for (int col = 0; col < Bc; col++) {\n        if (col == Bc / 2) {\n"
                   "          for (int r = 0; r < rows; r++) {\n"
                   "            const int row = i * Br + warp * rows + r;\n"
                   "            for (int c = 0; c < dims; c++) {\n"
                   "              const int k = lane + 32 * c;\n"
                   "              if (row < p.N_q && k < d) {\n"
                   "                atomicAdd(&dQ[row * p.dQ.stride_n + k], p.scale * dQ_reg[r][c]);\n"
                   "                dQ_reg[r][c] = 0.f;\n              }\n            }\n          }\n"
                   "        }\n        for (int c = 0; c < dims; c++) {\n          const float key"),
                  right_on_randn=True),
            wrong("dQ's rows d apart", r"^out of bounds.* dQ\[.*stride_n",
                  ("atomicAdd(dQ + row * p.dQ.stride_n + k", "atomicAdd(dQ + row * d + k"),
                  right_on_randn=True),
        )),
    Exercise(
        number=11, name="dQ_loop", title="dQ without atomics", lesson="05", direction="bwd",
        stage="deterministic", sections=("dQ_i along the tiles of K and V",), tiles={"Br": 32, "Bc": 64},
        score=("hbm", "wavefronts"), at_most={"hbm": 1.05}, own_calls=CAUSAL_SCORE,
        deterministic=True,
        specification="""
The hard one: nearly the whole kernel, though all of its lines have been seen before, here or in flash2. A
block of dQ_kernel has the tile Q_i, and dO_i, in shared memory. It walks along the tiles of K and V that a
row of Q_i sees, tiles[0] to tiles[tiles.end - 1], and sums up in registers

  dQ_reg = sum over j of dS_ij K_j      dS_ij = P_ij (dO_i V_j^T - D)      P_ij = e^(scale * Q_i K_j^T - L)

The scale of dQ follows after the loop.

Given: K_smem and V_smem, each Bc x d with rows d + 1 apart; Q_smem and dO_smem, Br x d, for which load_tile
has been called, but no barrier; dS_smem, Br x Bc, for what goes from lane to lane. This warp has the rows
warp * rows to warp * rows + rows - 1 of dS_ij and dQ_i; in S and dP its lane has the columns lane + 32 * c
(c < cols), in dQ_reg the columns lane + 32 * c (c < dims). p.L and D are (B, H, N_q), contiguous; this
head's begin at first_row. This block reads key head h_kv.

dS is 0 where the query does not see the key, and past N_q and N_k: mask.sees(row, col) is false there
(stages/common/mask.cuh). L and D end at N_q. d may be 40. Tiles that no row of Q_i sees must not be brought:
the check counts HBM traffic, with a causal mask. And it compares the bits when blocks run in another order.
""",
        hints=(
            "The loop is flash2's: for each t below tiles.end, with j = tiles[t], a barrier, two load_tile, "
            "a barrier.",
            "S, dP and dS are made as in dKV_kernel above, without P_smem.",
            "A lane makes dS of its own columns, and then needs those of all: through dS_smem. Only its "
            "own warp's rows, so that no barrier of the block is needed.",
            "The product: for each key col < Bc and each c one number of K_smem, for all rows r one of "
            "dS_smem."),
        mutants=(
            wrong("no barrier before the copy", r"^race.*[KV]_smem",
                  ("t < tiles.end; t++) {\n    const int j = tiles[t];\n    __syncthreads();               "
                   "       // all are done with the last tiles, which are now overwritten\n",
                   "t < tiles.end; t++) {\n    const int j = tiles[t];\n")),
            wrong("no barrier after the copy", r"^race.*_smem",
                  ("    __syncthreads();                      // nobody reads before everybody has written\n"
                   "\n    float S_reg",
                   "    float S_reg")),
            wrong("no __syncwarp", r"^race.*dS_smem",
                  ("    __syncwarp();                         // a warp reads only the rows of dS that it "
                   "wrote itself\n",
                   "")),
            wrong("all tiles", r"^too much traffic.*excess is of [KV]",
                  ("int t = 0; t < tiles.end", "int t = 0; t < ceil_div(p.N_k, Bc)"), right_on_randn=True),
            wrong("tiles up to the first that the mask cuts", r"^wrong result.*tiles of keys are left out",
                  ("int t = 0; t < tiles.end", "int t = 0; t < tiles.cut"), right_on_randn=True),
            wrong("the mask off by one", r"^wrong result.*mask is off by one.*one key too few.*dQ\[",
                  ("mask.sees(row, col) ? expf(mask.score(x, row, col) - L_row) : 0.f; // line 11",
                   "row < p.N_q && col < p.N_k && (!CAUSAL || col < row + p.diagonal) ? expf(x - L_row) : "
                   "0.f;")),
            wrong("V for K", r"^wrong result.*dQ is made of V",
                  ("? K_smem[col * (d + 1) + lane + 32 * c] : 0.f;",
                   "? V_smem[col * (d + 1) + lane + 32 * c] : 0.f;")),
            wrong("the last tile only", r"^wrong result.*last tile of keys only",
                  ("    float S_reg[rows][cols] = {}, dP_reg[rows][cols] = {};\n    for (int k",
                   "    for (int r = 0; r < rows; r++) for (int c = 0; c < dims; c++) dQ_reg[r][c] = "
                   "0.f;\n    float S_reg[rows][cols] = {}, dP_reg[rows][cols] = {};\n    for (int k")),
            wrong("scaled in the loop, too", r"^wrong result.*dQ is scaled twice",
                  ("dQ_reg[r][c] += dS_smem[(warp * rows + r) * Bc + col] * key;",
                   "dQ_reg[r][c] += p.scale * dS_smem[(warp * rows + r) * Bc + col] * key;")),
            wrong("L past the end", r"^out of bounds.* L\[",
                  ("      const float L_row = row < p.N_q ? p.L[first_row + row] : 0.f;      // line 9\n"
                   "      const",
                   "      const float L_row = p.L[first_row + row];\n      const")),
        )),
]
