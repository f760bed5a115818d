"""The exercises over Hopper's backward: lesson 14."""

from dataclasses import replace

from ..cases import Calls, Case
from ..exercise import Exercise
from ..probes import Probe
from .forward import wrong
from .warpgroups import HANGS, UNDER_WGMMA

TILES = {"Br": 64, "Bc": 128}      # two warpgroups of keys; three tiles of queries in small calls
# Three tiles of Q, of which two have buffers; a group of heads, and rows past the ends
BACKWARD = Calls((Case(1, 2, 2, 192, 128, 64, False, None, 1), Case(1, 2, 1, 139, 75, 64, False, 3.0, 2)),
                 Case(1, 2, 1, 256, 128, 64, False, None, 13), Case(1, 1, 1, 192, 128, 64, False, None, 7))

# ------------------------------------------------------------------------------------ 44
LEFT = "    if (lane == 0) bulk_wait_read<0>();     // the last ones have left\n"
FENCE = "    fence_proxy_async();\n    __syncwarp();\n    const int from"
ASK = "    if (lane == 0 && from < to) {\n"
COMMIT = "      bulk_commit();\n"
UNDER_ADD = r"^race.*dQ_smem\[\d+\].*stores from it.*must wait for it first"
GOES_ON = Probe(
    "if (threadIdx.x % 32 == 0) bulk_wait<0>();",
    "if (threadIdx.x % 32 == 0) dQ_smem[16 * warp * staged] = 0.f; "
    "if (threadIdx.x % 32 == 0) bulk_wait<0>();",
    "The result is right, but no copy is under way after bulk_add_fragments(): the warp has waited for its "
    "own numbers to leave. Ask for the copy and go on; wait when the staging is needed again.",
    finding="race")

# ------------------------------------------------------------------------------------ 45
DV = "      wgmma_PV(dV_reg, P_frag, dO_columns + buffer);                     // line 12: + P_ij^T dO_i\n"
WAIT_DP = "      wgmma_wait<1>();                    // dP^T is there, dV goes on\n"
DK = "      wgmma_PV(dK_reg, dS_frag, Q_columns + buffer);                     // line 16: + dS_ij^T Q_i\n"
WAIT_DV = "      wgmma_wait<1>();                    // dV is there, dK goes on\n"
MEET = ("      named_barrier_sync(1, 32 * warps);  // all of dS is there, and nobody reads L_i and D_i any "
        "more\n")
DO_BACK = "      dO_smem.release(n);\n"
DQ = "      wgmma_dQ<Bc / 16>(dQ_reg, dS_rows + dS_buffer, K_columns);\n"
WAIT_DK = "      wgmma_wait<1>();                    // dK is there, dQ goes on\n"
Q_BACK = "      Q_smem.release(n);\n"
WAIT_DQ = Q_BACK + "      wgmma_wait<0>();\n"
UNDER_DS = Probe(
    "for_both(P_frag, dP_reg, [&](float P, float& dP, int r, int c) {",
    "if (dV_reg[0][0] == 1.5f) dP_reg[0][0] = 0.f; "
    "for_both(P_frag, dP_reg, [&](float P, float& dP, int r, int c) {",
    "The result is right, but nothing runs while dS is made: dV is done by then. The check has looked at dV "
    "there, and it was not under way. Issue dV; then wait for dP^T only.", finding="accumulator")

# ------------------------------------------------------------------------------------ 46
C = "Mask::scores ? 1.f : copysignf(fmaxf(fabsf(c), 1e-18f), c);"
BASE = "const float c = scale * LOG2_E;"
L_SEED = "w.times_L = -1.f / factor_of_S(scale);"
D_SEED = "w.times_D = -1.f;"
EXP = "const float P = fast_exp2(c * x);"
SEEDS = replace(BACKWARD, cases=(
    *BACKWARD.cases, Case(1, 2, 1, 101, 70, 64, False, -0.3, 4), Case(1, 1, 1, 75, 40, 64, False, 1e-38, 5),
    Case(1, 2, 1, 139, 70, 64, True, None, 6)))

EXERCISES = [
    Exercise(
        number=44, name="bulk_add", title="dQ leaves by itself", lesson="14", direction="bwd",
        stage="tma_reduce", sections=("through staging, to HBM",), common=("bulk_sums.cuh",), tiles=TILES,
        own_calls=BACKWARD, probes=(GOES_ON,),
        specification="""
A warp has strips of 16 rows of dQ in registers, acc, and adds them to HBM by the copy engine, which reads
shared memory. The loop goes through each strip by pieces of `staged` fragments, as many as this warp's
`staging` has room for. Write its body: put the fragments first, first + 1, ... (less than n_tiles) of all
strips into staging, and have the engine add them to dQ, without waiting for that. (This stage has one strip;
dq_by_turns has two.)

In staging a fragment has 32 float4, one for each lane: element x of lane's float4 is acc[s][n][x]. Fragments
of a strip follow each other, from fragment `first` on, and so do the strips, with room for `staged`
fragments each. The copy before may still read them. In dQ it is the same, so a piece of a strip is one copy:

  const int from = max(col + 8 * first, first_col), to = min(col + 8 * (first + staged), columns);

are the columns that the engine adds, none if from >= to. The tile has `columns`, d in this stage. A column of
16 rows is 64 bytes. The copy goes

  to      dQ + (row + 64 * s) * columns + 16 * from
  from    staging + 128 * s * staged + 16 * (from - col - 8 * first)

Given, in stages/common/hopper.cuh: bulk_add(to, from, bytes) asks for a copy that adds. bulk_commit() makes a
group of those that this thread has asked for. bulk_wait_read<n>() waits until all but the last n groups of
this thread have been read from shared memory, bulk_wait<n>() until they are also added. Each is about its own
thread's copies. fence_proxy_async(): what this thread has stored to shared memory is seen by the engine.

After the kernel's last tile lane 0 of each warp calls bulk_wait<0>(): so let lane 0 ask.
""",
        hints=(
            "Four steps: the staging is free; all lanes store; all stores are seen by the engine; one lane "
            "asks. What stands between two of them, if one lane does the one and 32 the other?",
            "The staging is free when the copy before has read it. Whether HBM has the sums is of no "
            "interest here: which of the two waits is enough? And who must wait: who has asked.",
            "if (lane == 0) wait; __syncwarp(); stores; fence_proxy_async() by all lanes; "
            "__syncwarp(); if (lane == 0 && from < to) { a bulk_add(...) for each strip; bulk_commit(); }"),
        mutants=(
            wrong("no fence", r"^proxy fence.*an engine, which may not see that yet",
                  (FENCE, FENCE.replace("    fence_proxy_async();\n", "")), right_on_randn=True),
            wrong("the staging is not waited for", UNDER_ADD, (LEFT, "")),
            wrong("a wait that leaves one copy under way", UNDER_ADD,
                  (LEFT, LEFT.replace("read<0>", "read<1>"))),
            wrong("another lane waits", UNDER_ADD, (LEFT, LEFT.replace("lane == 0", "lane == 1"))),
            wrong("no commit: no wait knows of the copy", UNDER_ADD, (COMMIT, "")),
            wrong("the warp waits at once", r"^no overlap.*no copy is under way",
                  (COMMIT, COMMIT + "      bulk_wait<0>();\n"), right_on_randn=True),
            wrong("each lane asks", r"^(wrong result|race)",
                  (ASK, ASK.replace("lane == 0 && ", ""))),
            wrong("nobody waits for the other lanes' stores", r"^(race|proxy fence)",
                  (FENCE, FENCE.replace("    __syncwarp();\n", ""))),
            wrong("a column is 16 bytes", r"^wrong result.*dQ",
                  ("64 * (to - from)", "16 * (to - from)")),
        )),
    Exercise(
        number=45, name="dv_under_ds", title="Who is done with what", lesson="14", direction="bwd",
        stage="overlap", sections=("dV under dS", "dK under dQ, and who is done with what"), tiles=TILES,
        own_calls=BACKWARD, probes=(UNDER_DS,), score=("hbm", "barriers"), at_most={"hbm": 1, "barriers": 1},
        specification="""
A step has five products. Issue each as soon as its operands are there, wait for each as late as possible, and
give buffers back as soon as nobody reads them. Before the first blank S^T and dP^T have been issued, in this
order, S^T is done, and P_frag has P^T in 16 bits. dP^T may still be under way.

First blank: dV += P^T dO. When it ends dP^T must be done, as dS is made of it next; dV is to go on.

Between the blanks dS^T is made; dS_frag has it, and so has this tile's buffer in shared memory, as far as
this warpgroup's keys go; what the warp has stored is fenced.

Second blank, in this order: issue dK += dS^T Q. Wait for dV only. Meet the other consumers, whose part of dS
this warpgroup needs for dQ. Give dO back. Declare dQ_reg, and issue dQ. Wait for dK only. Give Q back. Wait
for dQ, which leaves in the lines below.

Given: wgmma_PV(acc, A, B) issues a product as a group: dV_reg with P_frag and dO_columns + buffer; dK_reg
with dS_frag and Q_columns + buffer. float dQ_reg[dQ_columns / 8][4], and
wgmma_dQ<Bc / 16>(dQ_reg, dS_rows + dS_buffer, K_columns) for dS K. wgmma_wait<n>() waits until at most the
last n groups are under way. named_barrier_sync(1, threads) is for so many threads: there are 32 * warps
consumers. dO_smem.release(n) and Q_smem.release(n) say that this warp is done with the buffers of the n-th
tile, L and D included, which lie with Q and dO.
""",
        hints=(
            "Groups end in their order. Two are under way when dV has been issued: dP^T and dV. Which n "
            "waits for the first of them alone?",
            "Who reads dO: dP^T and dV. Who reads Q: S^T and dK. After which wait is each of them done?",
            "wgmma_wait<1>() three times, each after the product that was issued last: it leaves that one "
            "under way. wgmma_wait<0>() once, for dQ."),
        mutants=(
            wrong("dV is waited for at once", r"^no overlap.*nothing runs while dS",
                  (WAIT_DP, WAIT_DP.replace("<1>", "<0>")), right_on_randn=True),
            wrong("dP is not waited for", r"^accumulator.*may still add to", (WAIT_DP, "")),
            wrong("Q is given back before dK is done", UNDER_WGMMA,
                  (WAIT_DK + Q_BACK, Q_BACK + WAIT_DK), right_on_randn=True),
            wrong("Q is given back with dO", UNDER_WGMMA,
                  (DO_BACK, DO_BACK + Q_BACK), (WAIT_DQ, "      wgmma_wait<0>();\n"), right_on_randn=True),
            wrong("consumers do not meet", r"^race.*smem", (MEET, "")),
            wrong("the producer is counted", HANGS, (MEET, MEET.replace("32 * warps", "threads"))),
            wrong("dO is not given back", HANGS, (DO_BACK, "")),
            wrong("Q is not given back", HANGS, (WAIT_DQ, "      wgmma_wait<0>();\n")),
            wrong("dQ is not waited for", r"^accumulator.*may still add to", (WAIT_DQ, Q_BACK)),
            wrong("dK is made of P", r"^wrong result.*P and dS have changed places",
                  (DK, DK.replace("dS_frag", "P_frag"))),
        )),
    Exercise(
        number=46, name="seeds", title="A product that subtracts", lesson="14", direction="bwd",
        stage="seeded",
        sections=("c, and how a row of statistics becomes an accumulator", "what S and dP start from",
                  "P of it"), common=("seed.cuh",), tiles=TILES, own_calls=SEEDS,
        specification="""
P = 2^(scale2 * S - L), with S = Q K^T, L in base 2 and scale2 = scale * log2(e); dS = P (dP - D). wgmma adds
to its accumulator. Let S and dP start from such numbers that after the products nothing is left to subtract:
P = 2^(c * S) and dS = P * dP. prepare_kernel writes these numbers for each query, ahead of the main kernel:
w.times_L times L and w.times_D times D. Both factors are 1 if nobody sets them.

First blank: three functions of stages/common/seed.cuh.

  __host__ __device__ inline float factor_of_S(float scale)      c
  inline void prepare_seeds(Workspace& w, float scale)           sets w.times_L and w.times_D
  template <int n_tiles>
  __device__ __forceinline__ void seed(float (&acc)[n_tiles][4], const float* row)

c is scale2, with its sign, but with a size of 1e-18 at least: L / c must not be infinite (and c not 0). In a
mask that changes scores (Mask::scores) S is needed as it is: then c is 1, and L stays as it is, too.

seed() sets each element of an accumulator to row[col], col being its query, 0 to 8 * n_tiles - 1. S^T has
keys for rows, so both rows of a lane start from the same numbers.

Second blank: seed dP_reg from D_i, and S_reg from L_i, S_reg only if the mask does not change scores.

Third blank: `const float P` of the accumulator's element x.

Given: L_i and D_i in shared memory, Br floats each, as prepare_kernel has written them; L is infinite in rows
that count for nothing. LOG2_E is log2(e). for_each_two(one_strip(acc), [&](float& x, float& y, int, int col)
{ ... }) goes over pairs of neighbours, in columns col and col + 1. Write each as x = pinned(...): a move to a
register of its own, which the compiler does not put off. fast_exp2(x) is 2^x.
""",
        hints=(
            "c * (S + seed) = scale2 * S - L: solve for the seed.",
            "copysignf(size, sign), fmaxf and fabsf make c. Two neighbours of L_i or D_i are one float2.",
            "times_L is -1.f / factor_of_S(scale), times_D is -1.f; seed(S_reg, L_i), seed(dP_reg, D_i), and "
            "P = fast_exp2(c * x)."),
        mutants=(
            wrong("c without a least size", r"^wrong result.*scale=1e-38",
                  (C, "Mask::scores ? 1.f : c;"), right_on_randn=True),
            wrong("c without its sign", r"^wrong result.*scale=-0.3",
                  (C, "Mask::scores ? 1.f : fmaxf(c, 1e-18f);"), right_on_randn=True),
            wrong("L is added", r"^wrong result", (L_SEED, L_SEED.replace("-1.f", "1.f"))),
            wrong("L is not divided by c", r"^wrong result", (L_SEED, "w.times_L = -1.f;")),
            wrong("D is added", r"^wrong result.*D", (D_SEED, D_SEED.replace("-1.f", "1.f"))),
            wrong("dP starts from 0", r"^wrong result.*D is left out", (D_SEED, "w.times_D = 0.f;")),
            wrong("D is divided by c, too", r"^wrong result",
                  (D_SEED, "w.times_D = -1.f / factor_of_S(scale);")),
            wrong("2^x without c", r"^wrong result", (EXP, "const float P = fast_exp2(x);")),
            wrong("base e", r"^wrong result", (BASE, "const float c = scale;")),
            wrong("neighbours share a number", r"^wrong result",
                  ("y = pinned(two.y);", "y = pinned(two.x);")),
        )),
]
