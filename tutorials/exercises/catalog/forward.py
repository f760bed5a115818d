"""Exercises over the forward stages in fp32: lessons 01 to 04."""

from ..cases import CAUSAL_SCORE
from ..exercise import Change, Exercise, Mutant
from ..probes import Probe


def wrong(what: str, reason: str, *changes: tuple[str, str], right_on_randn: bool = False) -> Mutant:
    return Mutant(what, tuple(Change(*change) for change in changes), reason, right_on_randn)


# As if the first tile were far down in a large S: element (0, rows_before, 0) is past 2^31.
LARGE_S = Probe(
    "const int j = blockIdx.x % Tc, i = blockIdx.x / Tc % Tr, bh = blockIdx.x / Tc / Tr;",
    """
const int rows_before = ((1 << 30) / p.N_k + 1) * 2 / Br * Br + Br;
const int j = blockIdx.x % Tc, i = blockIdx.x / Tc % Tr + rows_before / Br, bh = blockIdx.x / Tc / Tr;
p.N_q += rows_before; p.Q.data -= rows_before * p.Q.stride_n; S -= (int64_t)rows_before * p.N_k;
""",
    "All results are right, but the index of S overflows: an int ends at 2^31, and a large S has more "
    "elements. "
    "(bh * N_q + row) * N_k + col must be made in int64_t from its first product on, as by (int64_t)bh. The "
    "check took a small S for the end of a large one.")


EXERCISES = [
    Exercise(
        number=1, name="scores", title="The score of a query and a key", lesson="01", direction="fwd",
        stage="naive", sections=("the score of one query and one key",), probes=(LARGE_S,),
        specification="""
Each thread of scores_kernel makes one element of S. This one has query row i * Br + threadIdx.y and key row
j * Bc + threadIdx.x, of batch element bh / H and query head bh % H. If the query sees the key, it stores

  S[bh][row][col] = scale * (Q[row][0] K[col][0] + Q[row][1] K[col][1] + ... + Q[row][d-1] K[col][d-1])

and -inf if not. (row is the query, col the key.) S is contiguous, (B * H, N_q, N_k).

Given: p.Q.head(b, h) points to the (N, d) matrix of one head (stages/common/tensor.cuh); its row n starts
at n * p.Q.stride_n. H / H_kv neighbouring query heads share a key head. With CAUSAL, query row sees key col
if col <= row + p.diagonal; without it all keys are seen.

N_q and N_k are no multiples of Br and Bc: a thread past the end must not read or write. And p.scale may be
negative.
""",
        hints=(
            "With H = 6 and H_kv = 2 the query heads 0, 1, 2 read key head 0, and 3, 4, 5 read key head 1.",
            "Return early if row >= p.N_q or col >= p.N_k: this kernel has no barrier that a thread could "
            "miss.",
            "An element of S is (bh * N_q + row) * N_k + col floats from its start. That can pass 2^31: "
            "begin with (int64_t)bh.",
            "Scale the sum first; then take it or -INFINITY."),
        mutants=(
            wrong("the wrong key head",
                  r"^wrong result.*key head of K is wrong: query head h reads h / \(H / H_kv\)",
                  ("h % p.H, h_kv = h / (p.H / p.H_kv);\n  const float* Q",
                   "h % p.H, h_kv = h % p.H_kv;\n  const float* Q")),
            wrong("no scale", r"^wrong result.*the scale is missing",
                  ("visible ? p.scale * s", "visible ? s")),
            wrong("the mask off by one", r"^wrong result.*mask is off by one.*one key too few",
                  ("= !CAUSAL || col <= row + p.diagonal", "= !CAUSAL || col < row + p.diagonal")),
            wrong("the mask without the diagonal", r"^wrong result.*the diagonal is left out",
                  ("= !CAUSAL || col <= row + p.diagonal", "= !CAUSAL || col <= row")),
            wrong("0 for a key that is not seen", r"^wrong result.*score 0: it must be -inf",
                  ("s : -INFINITY", "s : 0.f")),
            wrong("scale * -inf", r"^wrong result.*\+inf for a negative scale",
                  ("visible ? p.scale * s : -INFINITY", "p.scale * (visible ? s : -INFINITY)")),
            wrong("an index of 32 bits", r"^wrong result.*index of S overflows.*int64_t",
                  ("S[((int64_t)bh * p.N_q + row) * p.N_k + col] =", "S[(bh * p.N_q + row) * p.N_k + col] ="),
                  right_on_randn=True),
            wrong("only the part before the row in 64 bits", r"^wrong result.*index of S overflows.*int64_t",
                  ("S[((int64_t)bh * p.N_q + row) * p.N_k + col] =",
                   "S[(int64_t)bh * p.N_q * p.N_k + row * p.N_k + col] ="), right_on_randn=True),
            wrong("0 taken for masked", r"^wrong result.*score of 0 is taken for a key that is not seen",
                  ("visible ? p.scale * s", "visible && s != 0.f ? p.scale * s"), right_on_randn=True),
            wrong("rows d apart", r"^out of bounds.* Q\[.*stride_n",
                  ("Q[row * p.Q.stride_n + k]", "Q[row * d + k]"), right_on_randn=True),
            wrong("a large negative score", r"^wrong result.*large negative score, such as -1e9: it must be "
                                            r"-inf",
                  ("s : -INFINITY", "s : -1e9f"), right_on_randn=True),
            wrong("keys past the end", r"^out of bounds.* K\[",
                  ("row >= p.N_q || col >= p.N_k", "row >= p.N_q")),
            wrong("rows of S of N_q", r"^(race|out of bounds|uninitialised)",
                  ("p.N_q + row) * p.N_k + col] = visible", "p.N_q + row) * p.N_q + col] = visible")),
        )),
    Exercise(
        number=2, name="softmax", title="A softmax that does not overflow", lesson="01", direction="fwd",
        stage="naive", sections=("m, l, P and L of the row",),
        specification="""
Each thread of softmax_kernel has one row of S: S_row[0] to S_row[p.N_k - 1], in HBM, -inf where the query
does not see the key. Put P = softmax(S) in its place, and the row's log-sum-exp, in natural logarithms,
into p.L[row]:

  m = max_j S_j      l = sum_j e^(S_j - m)      P_j = e^(S_j - m) / l      L = log(sum_j e^(S_j))

L must be made of m and l: e^(S_j) itself may overflow.

A row that sees no key has nothing but -inf in S_row. Its P is 0 everywhere, and its L is -inf; NaN must not
appear.
""",
        hints=(
            "m must be complete before the first exponential: three loops over the row, one after the "
            "other.",
            "L = log(sum_j e^(S_j)) = log(e^m sum_j e^(S_j - m)). What is that in m and l?",
            "expf(-INFINITY - -INFINITY) is NaN. Subtract 0 where m is -INFINITY: expf(-INFINITY) is 0. "
            "Then l is 0, and 0 / 0 is NaN again: P needs a case of its own."),
        mutants=(
            wrong("-inf - -inf", r"^wrong result.*-inf is subtracted from -inf",
                  ("const float shift = m == -INFINITY ? 0.f : m;", "const float shift = m;")),
            wrong("0 / 0", r"^wrong result.*O is divided by l = 0",
                  ("S_row[col] = l == 0.f ? 0.f : expf", "S_row[col] = expf")),
            wrong("L without the maximum", r"^wrong result.*L lacks the maximum", ("m + logf(l)", "logf(l)")),
            wrong("P not normalised", r"^wrong result.*O is not divided by l",
                  ("expf(S_row[col] - shift) / l", "expf(S_row[col] - shift)")),
            wrong("the maximum begins with 0", r"^wrong result.*maximum begins with 0: it must begin with "
                                               r"-inf",
                  ("float m = -INFINITY, l = 0.f;\n  for (int col = 0; col < p.N_k; col++) m = fmaxf(m, S_row"
                   "[col]);\n  const float shift = m == -INFINITY ? 0.f : m;   // a row that sees no key: "
                   "-inf - "
                   "-inf would be NaN\n  for",
                   "float m = 0.f, l = 0.f;\n  for (int col = 0; col < p.N_k; col++) m = fmaxf(m, "
                   "S_row[col]);\n"
                   "  const float shift = m;\n  for"), right_on_randn=True),
            wrong("no maximum", r"^wrong result.*maximum is not subtracted",
                  ("const float shift = m == -INFINITY ? 0.f : m;   // a row that sees no key: -inf - -inf "
                   "would "
                   "be NaN\n",
                   "const float shift = 0.f;\n  if (m > -INFINITY) m = 0.f;\n"), right_on_randn=True),
            wrong("0 taken for masked", r"^wrong result.*score of 0 is taken for a key that is not seen",
                  ("S_row[col] = l == 0.f ? 0.f", "S_row[col] = l == 0.f || S_row[col] == 0.f ? 0.f"),
                  right_on_randn=True),
            wrong("one loop for m and l", r"^wrong result.*before the maximum is complete",
                  ("m = fmaxf(m, S_row[col]);\n  const float shift = m == -INFINITY ? 0.f : m;   // a row "
                   "that sees no key: -inf - -inf would be NaN\n"
                   "  for (int col = 0; col < p.N_k; col++) l += expf(S_row[col] - shift);",
                   "{\n    m = fmaxf(m, S_row[col]);\n    if (m > -INFINITY) l += expf(S_row[col] - m);\n"
                   "  }\n  const float shift = m == -INFINITY ? 0.f : m;")),
        )),
    Exercise(
        number=3, name="tiles", title="Tiles of P and V", lesson="02", direction="fwd", stage="tiled",
        sections=("O_i along the tiles of P and V",), tiles={"Br": 32, "Bc": 64}, score=("hbm", "wavefronts"),
        at_most={"hbm": 1.05},
        specification="""
A block of output_kernel has the tile O_i, and walks along the Tc tiles of V and of its rows of P. For each
of them: bring V_j into V_smem and P_ij into P_smem, and add P_ij V_j to O_reg. Each element of the tiles is
read from HBM once in a block: the product reads shared memory only.

Given: V_smem is Bc x d (rows d apart), P_smem is Br x Bc. This warp has the rows warp * rows to warp * rows
+ rows - 1 of P_ij and O_i; O_reg[r][c] belongs to row warp * rows + r, column lane + 32 * c of O_i.
load_tile (stages/common/tile.cuh) copies a tile, by all threads, with zeros for rows past the end; see
scores_kernel. P is (B * H, N_q, N_k) in HBM, contiguous; this block has head bh.

No row or column of P past N_q or N_k may be read: P_smem has 0 there. Columns of O from d on do not exist,
and V_smem has none for them (d may be 40). All warps read all of V_smem.
""",
        hints=(
            "Two things must not happen: that a warp reads V_smem before the others have filled it, and "
            "that a fast warp overwrites it while a slow one still multiplies by the last tile. Each "
            "takes a barrier.",
            "P_smem: row r of the warp is row i * Br + warp * rows + r of the head, and lane t brings the "
            "columns t, t + 32, ...: neighbouring lanes read neighbouring numbers of HBM.",
            "The product: for each col < Bc and each c read one number of V_smem, and use it for all rows "
            "r: all lanes read the same P_smem[(warp * rows + r) * Bc + col]."),
        mutants=(
            wrong("no barrier before the copy", r"^race.*[PV]_smem.*barrier",
                  ("    __syncthreads();                      // all are done with the last tiles, which "
                   "are now overwritten\n",
                   "")),
            wrong("no barrier after the copy", r"^race.*[PV]_smem.*barrier",
                  ("    }\n    __syncthreads();\n\n", "    }\n\n")),
            wrong("a barrier of the warp", r"^race.*V_smem",
                  ("    }\n    __syncthreads();\n\n", "    }\n    __syncwarp();\n\n")),
            wrong("rows of P past the end", r"^out of bounds",
                  ("row < p.N_q && col < p.N_k ? P[", "col < p.N_k ? P["), right_on_randn=True),
            wrong("columns of P past the end", r"^out of bounds",
                  ("row < p.N_q && col < p.N_k ? P[", "row < p.N_q ? P["), right_on_randn=True),
            wrong("a column of P a lane", r"^uninitialised.*P_smem",
                  ("        const int row = i * Br + warp * rows + r, col = j * Bc + lane + 32 * c;\n"
                   "        P_smem[",
                   "        const int row = i * Br + warp * rows + r, col = j * Bc + lane + 32 * c;\n"
                   "        if (c == 0) P_smem[")),
            wrong("the tile of V by Br", r"^wrong result.*tile j of V is taken from row j \* Br",
                  ("p.V.stride_n, j * Bc, Bc, p.N_k);", "p.V.stride_n, j * Br, Bc, p.N_k);")),
            wrong("P from HBM in the product", r"^too much traffic.*excess is of S, P.*P\[",
                  ("O_reg[r][c] += P_smem[(warp * rows + r) * Bc + col] * value;",
                   "{\n          const int row = i * Br + warp * rows + r;\n"
                   "          if (row < p.N_q && j * Bc + col < p.N_k)\n"
                   "            O_reg[r][c] += P[((int64_t)bh * p.N_q + row) * p.N_k + j * Bc + col] * "
                   "value;\n        }"), right_on_randn=True),
        )),
    Exercise(
        number=4, name="merge", title="A tile joins the row", lesson="03", direction="fwd",
        stage="online_softmax", sections=("the tile joins the row so far", "O_i of all keys so far"),
        tiles={"Br": 32, "Bc": 64},
        specification="""
FlashAttention-1, Algorithm 1, lines 11 and 12. What is known of a row is given twice: of the keys before
this tile m_old, l_old[r] and, in HBM, O; of the tile alone m_tile, l_tile and, in O_reg, P~_ij V_j. Each is
relative to its own maximum, and O in HBM is normalised: it is the output of attention to the keys so far.

First blank: m_new[r], the maximum of both; alpha[r] and beta[r], the factors that make what is relative to
m_old and to m_tile relative to m_new[r]; and l_new[r]. A row that has seen no key yet has m_new = -inf, and
-inf - -inf is NaN: subtract 0 there.

Second blank: O in HBM becomes the normalised output of attention to all keys so far. This warp has the row
`row` of O, which starts at O + row * p.O.stride_n; this lane its columns lane, lane + 32, ... below d, of
which O_reg[r][c] is number c. O is 0 from the start, and stays 0 until the row sees a key.
""",
        hints=(
            "e^(S - m_tile) becomes e^(S - m_new) by a factor that does not depend on S. Neither factor "
            "is above 1.",
            "l_new is a sum of two terms: each part's l times its factor.",
            "O of the old keys is a sum divided by l_old. Undo that division, add, and divide by l_new.",
            "Where l_new[r] is 0 there is nothing to divide by: leave O as it is."),
        mutants=(
            wrong("m is never followed", r"^wrong result.*m does not follow the maximum",
                  ("m_new[r] = fmaxf(m_old, m_tile);", "m_new[r] = m_old == -INFINITY ? m_tile : m_old;"),
                  right_on_randn=True),
            wrong("the tile's own maximum", r"^wrong result.*m is the last tile's maximum",
                  ("m_new[r] = fmaxf(m_old, m_tile);", "m_new[r] = m_tile == -INFINITY ? m_old : m_tile;"),
                  right_on_randn=True),
            wrong("a maximum of at least 0", r"^wrong result.*maximum begins with 0: it must begin with -inf",
                  ("m_new[r] = fmaxf(m_old, m_tile);", "m_new[r] = fmaxf(fmaxf(m_old, m_tile), 0.f);"),
                  right_on_randn=True),
            wrong("O taken as not normalised", r"^wrong result.*old O lacks the factor l",
                  ("(l_old[r] * alpha[r] * *o", "(alpha[r] * *o")),
            wrong("O not rescaled", r"^wrong result.*O is not rescaled",
                  ("(l_old[r] * alpha[r] * *o", "(l_old[r] * *o")),
            wrong("l not rescaled", r"^wrong result.*l is not rescaled",
                  ("alpha[r] * l_old[r] + beta", "l_old[r] + beta")),
            wrong("no beta in O", r"^wrong result.*the tile's P~ V_j lacks",
                  ("beta[r] * O_reg[r][c]", "O_reg[r][c]")),
            wrong("no beta in l", r"^wrong result.*the tile's l~ lacks", ("+ beta[r] * l_tile", "+ l_tile")),
            wrong("alpha and beta in each other's place", r"^wrong result.*changed places",
                  ("alpha[r] = expf(m_old - shift_new);", "beta[r] = expf(m_old - shift_new);"),
                  ("beta[r] = expf(m_tile - shift_new);", "alpha[r] = expf(m_tile - shift_new);")),
            wrong("-inf - -inf", r"^wrong result.*-inf is subtracted from -inf",
                  ("const float shift_new = m_new[r] == -INFINITY ? 0.f : m_new[r];",
                   "const float shift_new = m_new[r];"),
                  ("l_new[r] == 0.f) continue;", "false) continue;")),
            wrong("0 / 0", r"^wrong result.*O is divided by l = 0",
                  ("if (k >= d || l_new[r] == 0.f)", "if (k >= d)")),
            wrong("columns from d on", r"^(out of bounds|race)",
                  ("if (k >= d || l_new[r] == 0.f)", "if (l_new[r] == 0.f)")),
        )),
    Exercise(
        number=5, name="rescale", title="Follow the maximum", lesson="04", direction="fwd", stage="flash2",
        sections=("m, l and O follow the new maximum",),
        specification="""
S_reg holds this warp's rows of S_ij, masked and scaled, and m_new the row's maximum over all tiles so far.
Now the online softmax (FlashAttention-2, Algorithm 1, lines 9 and 10): make P~ = e^(S - m_new), put it into
P_smem, add the row's sum over all lanes to l, and give what l and O_reg had before the factor e^(m -
m_new). At the end m[r] is m_new.

A row that has seen no key yet has m_new = -inf, and -inf - -inf is NaN: subtract 0 there.
""",
        hints=(
            "Which of l, O and P~ are relative to the old maximum, and which to the new one?",
            "warp_sum(x) (stages/common/warp.cuh) gives every lane the sum of x over the warp. Sum up a "
            "lane's own columns first.",
            "alpha = expf(m[r] - shift) is 0 for the first tile, where m is -inf, and 1 where the maximum "
            "stays."),
        mutants=(
            wrong("the inverse, as printed", r"inverse", ("*= alpha;", "*= 1.f / alpha;")),
            wrong("m is never followed", r"^wrong result.*m does not follow the maximum",
                  ("const float shift = m_new == -INFINITY ? 0.f : m_new;",
                   "if (m[r] > -INFINITY) m_new = m[r];\n      "
                   "const float shift = m_new == -INFINITY ? 0.f : m_new;"), right_on_randn=True),
            wrong("no maximum", r"^wrong result.*maximum is not subtracted",
                  ("const float shift = m_new == -INFINITY ? 0.f : m_new;",
                   "if (m_new > -INFINITY) m_new = 0.f;\n      const float shift = 0.f;"),
                  right_on_randn=True),
            wrong("0 taken for masked", r"^wrong result.*score of 0 is taken for a key that is not seen",
                  ("const float P = expf(S_reg[r][c] - shift);",
                   "const float P = S_reg[r][c] == 0.f ? 0.f : expf(S_reg[r][c] - shift);"),
                  right_on_randn=True),
            wrong("O not rescaled", r"^wrong result.*O is not rescaled",
                  ("      for (int c = 0; c < dims; c++) O_reg[r][c] *= alpha;               // line 10: e^("
                   "m - m_new) O\n",
                   "")),
            wrong("l not rescaled", r"^wrong result.*l is not rescaled",
                  ("alpha * l[r] + warp_sum", "l[r] + warp_sum")),
            wrong("a lane's own sum", r"^wrong result.*each lane's own columns",
                  ("+ warp_sum(l_tile);", "+ l_tile;")),
            wrong("alpha after m", r"^wrong result.*neither O nor l",
                  ("const float alpha = expf(m[r] - shift);",
                   "m[r] = m_new;\n      const float alpha = m_new == -INFINITY ? 0.f : expf(m[r] - "
                   "shift);")),
            wrong("-inf - -inf", r"^wrong result.*-inf is subtracted from -inf",
                  ("const float shift = m_new == -INFINITY ? 0.f : m_new;", "const float shift = m_new;")),
            wrong("a column of P a lane", r"^(uninitialised|race).*P_smem",
                  ("* Bc + col] = P *", "* Bc + lane] = P *")),
        )),
    Exercise(
        number=6, name="finish", title="Where to stop, and what to store", lesson="04", direction="fwd",
        stage="flash2", sections=("how many keys a row sees", "O and L leave the registers"),
        common=("mask.cuh",), tiles={"Br": 32, "Bc": 64}, at_most={"hbm": 1.05}, own_calls=CAUSAL_SCORE,
        specification="""
First blank: seen_by(row) of the Mask, which all later stages share (stages/common/mask.cuh; here it stands
in the file). It returns how many keys the query of `row` sees. Which ones, the mask's rule says: the keys
before rule.end_key(row). The rule is a file of stages/masks. In causal.cuh it has

  int end_key(int row) const { return row + 1 + diagonal; }

and without a mask end_key(row) is N_k. The number of keys is never above N_k and never below 0. But end_key
may be, as diagonal may be any number, and row at or past N_q. tiles.end, where the loop over t stops, is
made of seen_by (in key_tiles). With too many keys the result would be right, but tiles would be brought in
vain: the check counts HBM traffic.

Second blank: the row is done. O_reg[r][c], column lane + 32 * c, is not normalised yet; m[r] and l[r] are
the same in all lanes. Write O and L (FlashAttention-2, Algorithm 1, lines 12 to 15): O's row begins at O +
row * p.O.stride_n, and L is (B * H, N_q), contiguous; this block has head bh. Columns from d on do not
exist. A row that has seen no key gets O = 0 and L = -inf. One lane writes L.
""",
        hints=(
            "With diagonal = 0, row 0 sees one key, key 0. And with diagonal = 5? With -5?",
            "rule.end_key(row) is the number that is asked for, but for its bounds: min and max keep it "
            "between 0 and N_k.",
            "L = log(sum_j e^(S_j)), and l = sum_j e^(S_j - m).",
            "l[r] is 0 if and only if the row has seen no key."),
        mutants=(
            wrong("all keys", r"^too much traffic.*excess is of K",
                  ("return max(min(N_k, rule.end_key(row)), 0);", "return N_k;"), right_on_randn=True),
            wrong("a key too many", r"^too much traffic.*excess is of K",
                  ("rule.end_key(row)), 0)", "rule.end_key(row) + 1), 0)"), right_on_randn=True),
            wrong("a key too few", r"^wrong result.*tiles of keys are left out",
                  ("rule.end_key(row)), 0)", "rule.end_key(row) - 1), 0)"), right_on_randn=True),
            wrong("no diagonal", r"^wrong result.*tiles of keys are left out",
                  ("return max(min(N_k, rule.end_key(row)), 0);",
                   "return CAUSAL ? max(min(N_k, row + 1), 0) : N_k;"), right_on_randn=True),
            wrong("rows d apart", r"^out of bounds.* O\[.*stride_n",
                  ("O[row * p.O.stride_n + k] =", "O[row * d + k] ="), right_on_randn=True),
            wrong("causal in every call", r"^wrong result.*tiles of keys are left out",
                  ("return max(min(N_k, rule.end_key(row)), 0);",
                   "return max(min(N_k, row + 1 + N_k - N_q), 0);")),
            wrong("not divided by l", r"^wrong result.*O is not divided by l",
                  ("O_reg[r][c] / l[r]", "O_reg[r][c]")),
            wrong("0 / 0", r"^wrong result.*O is divided by l = 0", ("l[r] == 0.f ? 0.f : O_reg", "O_reg")),
            wrong("L without the maximum", r"^wrong result.*L lacks the maximum",
                  ("m[r] + logf(l[r])", "logf(l[r])")),
            wrong("all lanes write L", r"^race.* L\[",
                  ("    if (lane == 0)                                                       // lines 13, 15"
                   "\n", "")),
            wrong("columns from d on", r"^(out of bounds|race)", ("if (k < d_v) O[", "O[")),
        )),
]
