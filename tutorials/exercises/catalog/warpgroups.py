"""The exercises over warpgroups, which multiply while others wait: lesson 13."""

from dataclasses import replace

from ..cases import CASES, FEW, Calls, Case
from ..exercise import Exercise
from ..probes import Probe
from .forward import wrong

HANGS = r"^deadlock"
UNDER_COPY = r"^race.* smem\[\d+\].*copies to it at .*multiplies it at"
UNDER_WGMMA = r"^race.* smem\[\d+\].*multiplies it at .*copies to it at"
SMALL = {"Br": 64, "Bc": 32}       # several tiles of keys, and of queries, in small calls

# ------------------------------------------------------------------------------------ 37
PRODUCTS = "    multiply_S(t);\n    multiply_O(t - 1);\n"
WAIT_S = "    wgmma_wait<1>();\n    K_smem.release(t);\n"
SOFTMAX = "    softmax(t);\n"
NEXT_K = "    if (t + 1 < end) K_smem.wait_until_full(t + 1);\n"
WAIT_O = "    wgmma_wait<0>();\n    V_smem.release(t - 1);\n"
RESCALE = "    rescale(O_reg, alpha);                                               // line 10\n"
LAST = "  multiply_O(end - 1);\n  wgmma_wait<0>();\n"
UNDER_SOFTMAX = Probe(
    "const bool cut = t >= tiles.cut;",
    "const bool cut = t >= tiles.cut; if (t > 0 && O_reg[0][0] == 1.5f) m[0] = 0.f;",
    "The result is right, but nothing runs under the softmax: P V of tile t - 1 is done when softmax(t) "
    "begins. "
    "The check has looked at O there, and it was not under way. Issue both products first; then wait for the "
    "first one only.", finding="accumulator")

# ------------------------------------------------------------------------------------ 38
COLUMNS = 72                       # with at most 64 there is no slack
LAZY = Calls(tuple(replace(case, d=COLUMNS) for case in FEW.cases), replace(FEW.plain, d=COLUMNS),
             replace(FEW.score, d=COLUMNS))
STAY = "if (slack > 0.f && m_new - m <= slack) m_new = m;"
VOTE = "if (slack == 0.f || __any_sync(0xffffffff, alpha[0] != 1.f || alpha[1] != 1.f))\n"
M_STAYS = Probe(
    "V_smem.release(t - 1);", "V_smem.release(t - 1); if (alpha[0] != 1.f || alpha[1] != 1.f) __trap();",
    "The result is right, but m follows each maximum that is a little larger, and alpha is not 1. With "
    "random "
    "numbers m must not move after the first tile: there no score passes it by more than `slack`.")
LEFT_ALONE = Probe(
    "Q_smem.wait_until_full(0);",
    """Q_smem.wait_until_full(0);
    auto rescale = [&](float (&acc)[width / 8][4], const float (&alpha)[2]) {
      if (alpha[0] == 1.f && alpha[1] == 1.f) __trap();
      ::rescale(acc, alpha);
    };""",
    "The result is right, but O is multiplied by 1: rescale() is called where alpha is 1 in all rows of the "
    "warp.")

# ------------------------------------------------------------------------------------ 39
TURNS = Calls((*FEW.cases, replace(FEW.cases[1], d=COLUMNS)))
IN_TURN = Probe(
    "const Turns<Br / 64> turns(warp / 4);",
    """__shared__ int turn;
    struct Watched {
      Turns<Br / 64> turns;
      int* turn;
      mutable int mine;
      bool speaks() const { return threadIdx.x % 128 == 0; }
      void wait() const {
        turns.wait();
        if (speaks() && mine > 0 && *turn != mine) __trap();
      }
      void end() const {
        if (speaks()) *turn = mine + 1;
        mine += Br / 64;
        turns.end();
      }
      void end_all() const {
        turns.end_all();
        if (speaks() && mine % (Br / 64) == 0 && *turn != mine) __trap();
      }
    };
    const Watched turns{Turns<Br / 64>(warp / 4), &turn, warp / 4};""",
    "The result is right, but the warpgroups do not take turns. Between wait() and end() the check has had "
    "each "
    "one write to the same word of shared memory, the number of the turn: two were there at once, or not in "
    "the "
    "order 0, 1, 2, 0, ... Or warpgroup 0 does not meet the last end(), in end_all().")
WAIT_TURN = "if (warpgroups > 1) named_barrier_sync(1 + warpgroup, 256);"
END_TURN = "if (warpgroups > 1) named_barrier_arrive(1 + (warpgroup + 1) % warpgroups, 256);"
FIRST_TURN = "if (warpgroup == warpgroups - 1) end();"
LAST_TURN = "if (warpgroup == 0) wait();"

# ------------------------------------------------------------------------------------ 40
TICKETS = Calls((*FEW.cases, Case(2, 4, 2, 75, 20, 64, False, None, 14)), FEW.plain, replace(FEW.score, H=3,
H_kv=3))        # more tiles than blocks
HAND_OVER = "      next_smem[n % Q_buffers] = next;\n"
EMPTY_Q = "      Q_smem.wait_until_empty(n);\n"
TICKET = "next = all > gridDim.x ? gridDim.x + atomicAdd(static_cast<int*>(p.workspace), 1) : all;"
GO_HOME = ("      if (next >= all) return mbarrier_arrive(Q_smem.full + n % Q_buffers);         "
           "// the consumers end, too\n")
TAKE = "const int next = __shfl_sync(0xffffffff, lane == 0 ? next_smem[n % Q_buffers] : 0, 0);"
ASKED_FOR = Probe(
    "turns.end_all();",
    "turns.end_all(); if (threadIdx.x == 0 && all > gridDim.x && "
    "atomicAdd(static_cast<int*>(p.workspace), 0) <= all - gridDim.x) __trap();",
    "The result is right, but blocks do not ask the counter in p.workspace for their next tile. So who is "
    "done "
    "early cannot take more.")

# ------------------------------------------------------------------------------------ 36
LOWER = "address >> 4 | leading_bytes >> 4 << 16"
COLUMNS_ON = "return descriptor(matrix + (k / 4 * 128 * tile_rows + k % 4 * 32) / 16);"
ROWS_ON = "return descriptor(matrix + k * 2048 / 16);"

EXERCISES = [
    Exercise(
        number=36, name="descriptors", title="Where wgmma looks", lesson="13", direction="fwd", stage="wgmma",
        sections=("the lower half", "and the upper half", "16 columns further", "16 rows further"),
        common=("wgmma.cuh",), tiles={"Br": 128, "Bc": 32},
        own_calls=Calls((CASES[0], CASES[1], CASES[5])),
        specification="""
wgmma finds a tile in shared memory by a descriptor of 64 bits. Write the four functions of
stages/common/wgmma.cuh that make it; their comments, in this file, have the fields' bits.

First blank, matrix_at(tile, leading_bytes): return the lower half of the descriptor of a tile, its address
and
LBO, which is leading_bytes. The warp's lanes take lane 0's: __shfl_sync(0xffffffff, x, 0).

Second blank, descriptor(matrix): return all 64 bits. `matrix` is the lower half. The tile has the 128-byte
swizzle, and SBO leads to the next pattern of 8 rows.

Third blank, K_major(matrix, k, tile_rows): return the descriptor of columns 16 k to 16 k + 15 of a tile of Q
or of K, of tile_rows rows in panels of 64 columns. An instruction multiplies 16 columns. k counts on through
all panels.

Fourth blank, MN_major(matrix, k): return that of rows 16 k to 16 k + 15 of a tile of V. All of its columns
belong to the instruction, and LBO leads to the next panel.

Addresses and offsets are in units of 16 bytes. So n bytes further is n / 16 more in the lower half.
""",
        hints=(
            "Which bits have the address, LBO, SBO and the swizzle? Write down the bytes first, then what "
            "stands in the field, then how far it is shifted. What is shifted by 32 or more must have 64 "
            "bits.",
            "A row of a panel has 128 bytes, and a chunk of 16 columns 32 of them. How many such chunks are "
            "in a "
            "row? How long is a panel?",
            "The lower half: address >> 4, and LBO >> 4 at bit 16. The upper half: 1024 >> 4, and 1 at bit "
            "62 - "
            "32. Columns: k / 4 panels, and k % 4 chunks. Rows: 16 of 128 bytes."),
        mutants=(
            wrong("one panel only", r"^wrong result.*are always 32 bytes further",
                  (COLUMNS_ON, "return descriptor(matrix + k * 32 / 16);"), right_on_randn=True),
            wrong("no LBO", r"^wrong result.*LBO leads to the next one",
                  (LOWER, "address >> 4"), right_on_randn=True),
            wrong("SBO is a row", r"^wrong result.*SBO is 128 bytes, a row",
                  ("1024 >> 4 | 1 << 30", "128 >> 4 | 1 << 30")),
            wrong("no swizzle", r"^race.*V_smem\[2048\].*multiplies it",
                  ("uint64_t(1024 >> 4 | 1 << 30)", "uint64_t(1024 >> 4)")),
            wrong("panels of 64 rows", r"^(race|uninitialised|wrong result)",
                  (COLUMNS_ON, COLUMNS_ON.replace("tile_rows", "64")), right_on_randn=True),
            wrong("LBO in bytes", r"^out of bounds.*multiplies",
                  (LOWER, LOWER.replace("leading_bytes >> 4", "leading_bytes")), right_on_randn=True),
            wrong("the swizzle of 64 bytes", r"^race.*V_smem\[2048\].*multiplies it",
                  ("1 << 30)", "2u << 30)")),
            wrong("SBO in bytes", r"^proxy fence.*multiplies it", ("(1024 >> 4 |", "(1024 |")),
            wrong("elements for bytes", r"^wrong result.*an element has two bytes",
                  (COLUMNS_ON, COLUMNS_ON.replace("k % 4 * 32", "k % 4 * 16"))),
            wrong("bytes for units", r"^(error|race|uninitialised|wrong result)",
                  (COLUMNS_ON, COLUMNS_ON.replace(") / 16);", "));"))),
            wrong("V as if it were K", r"^wrong result.*as if k ran along its rows",
                  (ROWS_ON, ROWS_ON.replace("2048", "32"))),
            wrong("8 rows of V", r"^wrong result.*that is 8 rows",
                  (ROWS_ON, ROWS_ON.replace("2048", "1024"))),
        )),
    Exercise(
        number=37, name="overlap", title="P V under the next softmax", lesson="13", direction="fwd",
        stage="overlap", sections=("a step has two tiles", "after the last step"), tiles=SMALL,
        own_calls=FEW, probes=(UNDER_SOFTMAX,), score=("hbm", "barriers"), at_most={"hbm": 1, "barriers": 1},
        specification="""
Write step t of the loop, which works on two tiles: S and the softmax of tile t, and P V of tile t - 1. P V
is to run while the softmax does. In warp_specialized a step was

  wait for K_t; S; wait for it; give K_t back; softmax; rescale O; P; P V; wait for it; give V_t back

When step t begins, K_t is there, and P_frag has P~ of tile t - 1, whose V nobody has waited for. O has the
products up to tile t - 2, rescaled for the maximum of tile t - 1. When the step ends, all that must hold for
t + 1 (if there is such a step: there is no K of tile `end`).

Second blank, after the loop: what is left to do for O.

Given: multiply_S(t) issues S = Q K_t^T, a group of products. multiply_O(t) waits for V_t, and issues O +=
P~ V_t, another group. softmax(t) makes P~ of S_reg, in 32 bits; m and l follow, and alpha[r] is what O is to
be multiplied by. rescale(O_reg, alpha) does that; to_A(P_frag, S_reg) rounds P~. wgmma_wait<n>() waits until
at most the last n groups are under way: until then nobody touches the registers of a product, and nobody
gives back what it reads.

K_smem and V_smem are rings (stages/common/ring.cuh): wait_until_full(t), release(t).

ptxas moves arithmetic across a wait for products, and not across a loop. So let the wait for K_t+1 stand
between the softmax and the wait for P V.
""",
        hints=(
            "Which of the two products does the softmax need? It is to be issued first: then wgmma_wait<1>() "
            "waits for it, and leaves the other one.",
            "What does P V of tile t - 1 still use while it is under way? O_reg, P_frag and V_t-1. So three "
            "lines come after the wait for it.",
            "alpha of softmax(t) is for all that is in O before P V of tile t. Is P V of tile t - 1 a part "
            "of "
            "that?",
            "The order: both products; the wait for S; K back; softmax; the wait for the next K; the wait "
            "for "
            "P V; V back; O; P~. After the loop P~ of the last tile has not been multiplied."),
        mutants=(
            wrong("both products are waited for: nothing overlaps", r"^no overlap.*nothing runs under",
                  ("    wgmma_wait<1>();\n", "    wgmma_wait<0>();\n"), right_on_randn=True),
            wrong("K is given back before S is done", UNDER_WGMMA,
                  (PRODUCTS + WAIT_S, PRODUCTS + "    K_smem.release(t);\n    wgmma_wait<1>();\n"),
                  right_on_randn=True),
            wrong("O is rescaled too early", r"^accumulator.*may still add to",
                  (WAIT_O + RESCALE, RESCALE + WAIT_O)),
            wrong("O is not rescaled", r"^wrong result.*O is not rescaled when the maximum grows",
                  (RESCALE, "")),
            wrong("V is given back before P V is done", UNDER_WGMMA,
                  (NEXT_K + WAIT_O, "    V_smem.release(t - 1);\n" + NEXT_K + "    wgmma_wait<0>();\n"),
                  right_on_randn=True),
            wrong("P V first: then the wait is for that", r"^accumulator.*may still add to",
                  (PRODUCTS, "    multiply_O(t - 1);\n    multiply_S(t);\n")),
            wrong("P V of this tile", r"^wrong result.*P~ of a tile is multiplied by V of the next",
                  (PRODUCTS, PRODUCTS.replace("t - 1", "t"))),
            wrong("the last P V is left out", r"^wrong result.*P V of the last tile is missing",
                  (LAST, "  V_smem.wait_until_full(end - 1);\n")),
            wrong("nobody waits for the last P V", r"^(accumulator|wgmma)",
                  (LAST, LAST.replace("  wgmma_wait<0>();\n", ""))),
            wrong("nobody waits for the next K", UNDER_COPY, (NEXT_K, ""), right_on_randn=True),
            wrong("K is not given back", HANGS, (WAIT_S, "    wgmma_wait<1>();\n")),
            wrong("V is not given back", HANGS, (WAIT_O, "    wgmma_wait<0>();\n")),
            wrong("the softmax before S is there", r"^accumulator",
                  (WAIT_S + SOFTMAX, SOFTMAX + WAIT_S)),
        )),
    Exercise(
        number=38, name="lazy_rescale", title="Leave O alone", lesson="13", direction="fwd",
        stage="lazy_rescale", sections=("m may stay", "a vote"), common=("softmax.cuh",),
        tiles=SMALL, own_calls=LAZY, probes=(M_STAYS, LEFT_ALONE),
        specification="""
Any m gives the same O / l and the same L in the end, as long as no power of 2 overflows. So m need not be
the maximum: it may stay where it is while scores pass it by `slack` (8) or less. Then alpha is exactly 1,
and O need not be touched.

First blank, in maximum_step(): m_new is the maximum of the row so far, and m what has been subtracted until
now; both are in base 2, c x. m_new becomes what is to be subtracted from here on. slack is 0 in stages that
do not do this: then m_new stays the maximum, and that line must cost nothing.

Second blank, in the kernel: call rescale(O_reg, alpha), but only if it does anything for one of the warp's
rows. A lane has two rows, r = 0 and 1, and four lanes share them. A warp takes a branch together or not at
all: so its lanes vote. Where slack is 0 do not ask: call it.

The first tile has m = -infinity.
""",
        hints=(
            "What is m_new - m in the first tile? And in a row that has not seen a key yet? Which "
            "comparisons "
            "of that are true?",
            "__any_sync(0xffffffff, condition) is true in all lanes if the condition is in one of them.",
            "m may stay if m_new - m <= slack; alpha, which is made below, is then 2^0. The vote asks for "
            "alpha[0] and alpha[1]; `slack == 0.f ||` comes first, and is a constant."),
        mutants=(
            wrong("the second row has no vote",
                  r"^wrong result.*O is not rescaled in the second row of a lane",
                  (VOTE, VOTE.replace(" || alpha[1] != 1.f", "")), right_on_randn=True),
            wrong("O is never rescaled", r"^wrong result.*O is not rescaled when m moves",
                  (VOTE, "if (slack == 0.f)\n"), right_on_randn=True),
            wrong("m always follows: nothing is lazy", r"^wrong result.*m follows each maximum",
                  (STAY, "if (slack > 0.f && m_new - m <= 0.f) m_new = m;"), right_on_randn=True),
            wrong("all rows must agree", r"^wrong result.*O is not rescaled",
                  (VOTE, VOTE.replace("__any_sync", "__all_sync")), right_on_randn=True),
            wrong("the branch is always taken", r"^wrong result.*O is multiplied by 1",
                  (VOTE, "if (slack >= 0.f)\n"), right_on_randn=True),
            wrong("m stays for ever", r"^wrong result.*NaN",
                  (STAY, "if (slack > 0.f && m != -INFINITY) m_new = m;"), right_on_randn=True),
            wrong("the wrong way round", r"^wrong result", (STAY, STAY.replace("<=", ">"))),
            wrong("if alpha is 1", r"^wrong result.*scores rise along the keys",
                  (VOTE, VOTE.replace("!= 1.f", "== 1.f")), right_on_randn=True),
            wrong("m moves by the slack only", r"^wrong result",
                  (STAY, "if (slack > 0.f && m != -INFINITY) m_new = fminf(m_new, m + slack);"),
                  right_on_randn=True),
        )),
    Exercise(
        number=39, name="turns", title="One after the other", lesson="13", direction="fwd", stage="pingpong",
        sections=("turns",), common=("turns.cuh",), tiles={"Bc": 32}, own_calls=TURNS, probes=(IN_TURN,),
        specification="""
Consumers take turns in issuing their products: warpgroup 0, then 1, then (if there are three) 2, then 0
again. The kernel calls turns.wait() before the products of a step, and turns.end() after them; and
turns.end_all() when a warpgroup has no more steps. All warpgroups have as many.

Write the members of Turns<warpgroups>, for two warpgroups and for three. With one of them wait() and end()
do nothing:

  __device__ __forceinline__ explicit Turns(int warpgroup) : warpgroup(warpgroup) { ... }
  __device__ __forceinline__ void wait() const { ... }
  __device__ __forceinline__ void end() const { ... }
  __device__ __forceinline__ void end_all() const { ... }

All 128 threads of a warpgroup make each of these calls, in their order. Given, in stages/common/hopper.cuh:
named barriers 1 to 15 of the block,

  named_barrier_sync(id, threads)       arrive, and wait until so many threads have arrived
  named_barrier_arrive(id, threads)     arrive, and go on

`threads` counts both kinds, and is the same in all calls of one barrier. Then the barrier begins anew.

At the end of a kernel no barrier may be half full: threads that have arrived, and others that never will.
""",
        hints=(
            "Let each warpgroup have a barrier of its own, at which it waits for its turn. Who arrives "
            "there, "
            "and how many threads is that together?",
            "The next warpgroup is (warpgroup + 1) % warpgroups. Nobody has ended a turn before the first "
            "one: "
            "who lets warpgroup 0 begin, in the constructor?",
            "Each end() must be met by a wait(). Count them for two warpgroups with three steps each: who "
            "has "
            "ended a turn that nobody waits for?",
            "wait(): named_barrier_sync(1 + warpgroup, 256). end(): named_barrier_arrive at the next one's. "
            "The "
            "last warpgroup calls end() in the constructor, warpgroup 0 wait() in end_all()."),
        mutants=(
            wrong("nobody waits", r"^wrong result.*do not take turns",
                  (WAIT_TURN, ""), (END_TURN, ""), right_on_randn=True),
            wrong("three warpgroups only", HANGS,
                  (END_TURN, END_TURN.replace("% warpgroups", "% 3")), right_on_randn=True),
            wrong("to oneself", r"^wrong result.*do not take turns",
                  (END_TURN, END_TURN.replace("(warpgroup + 1) % warpgroups", "warpgroup")),
                  (FIRST_TURN, "end();"), (LAST_TURN, "wait();"), right_on_randn=True),
            wrong("nobody begins", HANGS, (FIRST_TURN, ""), (LAST_TURN, "")),
            wrong("a barrier that is not there", HANGS,
                  (END_TURN, END_TURN.replace("(warpgroup + 1) % warpgroups", "warpgroup + 1"))),
            wrong("one barrier is left half full", r"^wrong result.*does not meet the last end",
                  (LAST_TURN, ""), right_on_randn=True),
            wrong("all meet, and nobody is first", r"^wrong result.*do not take turns",
                  (WAIT_TURN, "if (warpgroups > 1) named_barrier_sync(1, 128 * warpgroups);"), (END_TURN, ""),
                  (LAST_TURN, ""), right_on_randn=True),
            wrong("all of the block's threads are counted", HANGS,
                  (WAIT_TURN, WAIT_TURN.replace("256", "128 * warpgroups")),
                  (END_TURN, END_TURN.replace("256", "128 * warpgroups"))),
            wrong("two warpgroups only", HANGS,
                  (END_TURN, END_TURN.replace("(warpgroup + 1) % warpgroups", "(warpgroup ^ 1)"))),
            wrong("warpgroup 0 lets the next one begin", HANGS,
                  (FIRST_TURN, "if (warpgroup == 0) end();")),
            wrong("the other way round", r"^wrong result.*do not take turns|^deadlock",
                  (END_TURN, END_TURN.replace("warpgroup + 1)", "warpgroup + warpgroups - 1)")),
                  (FIRST_TURN, "if (warpgroup == (warpgroups > 1)) end();"), right_on_randn=True),
        )),
    Exercise(
        number=40, name="tickets", title="A tile comes with its number", lesson="13", direction="fwd",
        stage="persistent",
        sections=("hand over the tile's number", "a ticket", "take the tile's number"), tiles=SMALL,
        own_calls=TICKETS, probes=(ASKED_FOR,), at_most={"hbm": 1.01},
        specification="""
There are `all` tiles of Q, and gridDim.x blocks, not more than tiles. A block's n-th tile of Q is in buffer
n % Q_buffers of the ring Q_smem, and the tile's number in next_smem[n % Q_buffers], a word of shared memory.
The producer hands the number over together with the tile. Its first tile is `next`, blockIdx.x at first.

First blank, the producer: hand over `next`. The consumers may still need the number that was there before.
If `next` is no tile, `all` or more, there is nothing to copy: the consumers must learn that, too, and the
producer returns.

Second blank, when Q_i has been asked for: draw the next number. The word of int at p.workspace counts the
tiles that blocks have asked for after their first ones; it is 0 at the start, if there are more tiles than
blocks, else nobody has written it. Tiles gridDim.x, gridDim.x + 1, ... go to who asks first. `all` means
that there is none.

Third blank, the consumers, all 32 lanes of each warp: wait for the n-th tile, and set `const int next` to
its number. If that is no tile, leave the loop. The warp's lane 0 alone says Q_smem.release(n), later, when
the warp is done with the buffer.

Given: Q_smem.wait_until_empty(n), Q_smem.wait_until_full(n), the mbarriers Q_smem.full + n % Q_buffers, of
one arrival a phase, and mbarrier_arrive(barrier), which completes such a phase if no bytes are announced
(stages/common/ring.cuh, hopper.cuh).
""",
        hints=(
            "Q_smem.fill(), below the first blank, arrives at the buffer's mbarrier `full`. What the "
            "producer "
            "did before that, consumers see after their wait. Which of its waits says that they have read "
            "the "
            "number before?",
            "atomicAdd(int*, 1) returns what was there before: 0, 1, 2, ... Nobody needs to ask if all > "
            "gridDim.x is false.",
            "Which lane's reads does the arrival of lane 0 speak for? Let that lane read, and tell the "
            "others "
            "by __shfl_sync(0xffffffff, x, 0).",
            "The end: mbarrier_arrive(Q_smem.full + n % Q_buffers) completes the phase without a copy."),
        mutants=(
            wrong("the numbers are shared out beforehand", r"^wrong result.*do not ask the counter",
                  (TICKET, "next += gridDim.x;"), right_on_randn=True),
            wrong("the number comes after Q", r"^race.*next_smem",
                  (HAND_OVER, ""), (TICKET, f"next_smem[n % Q_buffers] = next;\n      {TICKET}"),
                  (GO_HOME, "      if (next >= all) next_smem[n % Q_buffers] = next;\n" + GO_HOME),
                  right_on_randn=True),
            wrong("tickets begin with 0", r"^race.*blocks run in any order",
                  (TICKET, TICKET.replace("gridDim.x + atomicAdd", "atomicAdd")), right_on_randn=True),
            wrong("the consumers are not told", HANGS,
                  (GO_HOME, "      if (next >= all) return;\n")),
            wrong("the number is overwritten while others may read it", r"^race.*next_smem",
                  (EMPTY_Q, ""), right_on_randn=True),
            wrong("all lanes read, and one gives back", r"^race.*next_smem",
                  (TAKE, "const int next = next_smem[n % Q_buffers];"), right_on_randn=True),
            wrong("a ticket is thrown away", r"^wrong result",
                  (TICKET, TICKET.replace("workspace), 1)", "workspace), 1) + 1"))),
            wrong("who asks last", r"^error.*division by zero",
                  ("if (next >= all) break;", "if (next == all) break;")),
            wrong("always the first word", HANGS + "|^race.*next_smem|^wrong result",
                  (TAKE, TAKE.replace("[n % Q_buffers]", "[0]"))),
            wrong("the number before the wait", r"^race.*next_smem|^uninitialised.*next_smem",
                  ("    Q_smem.wait_until_full(n);\n", ""),
                  ("    if (next >= all) break;\n",
                   "    Q_smem.wait_until_full(n);\n    if (next >= all) break;\n")),
        )),
]
