"""The exercises and the bug hunt over the copy engine and mbarriers: lesson 12."""

from ..exercise import Exercise
from ..probes import Probe
from .forward import wrong
from .hunts import LOOK, changes, mending, paragraphs, unmended

INDEX = "return col / panel * tile_rows * panel + row * panel + (col % panel ^ row % 8 * 8);"
WHOLE_CHUNKS = Probe(
    "const Mask mask(p, b, h);",
    """
const Mask mask(p, b, h);
for (int row = 0; row < 8; row++) for (int col = 0; col < pitch; col++)
  if (panel_index(row, col, Bc) != panel_index(row, col / 8 * 8, Bc) + col % 8) return;
""",
    "The stage's result is right, as it asks for the first element of a chunk only. But an element loses its "
    "place in its chunk: panel_index(row, col, tile_rows) must be col % 8 more than where the chunk begins, "
    "and the chunk stays whole.")

BYTES = "2 * tile_bytes + (t == 0 ? sizeof(ELEMENT) * Br * pitch : 0)"
EXPECT = f"    mbarrier_arrive_expect(arrived, {BYTES});\n"
OF_Q = "if (t == 0) load_panels(Q_smem, Q_map, arrived, Br, i * Br, h, b);"
OF_K = "load_panels(K_smem + t % 2 * Bc * pitch, K_map, arrived, Bc, tiles[t] * Bc, h_kv, b);"
OF_V = "load_panels(V_smem + t % 2 * Bc * pitch, V_map, arrived, Bc, tiles[t] * Bc, h_kv, b);"
WAIT = "      mbarrier_wait(arrived_smem + t % 2, t / 2 % 2);\n"
BARRIER = ("      __syncthreads();                      "
           "// K_j and V_j are there; and all are done with the last ones\n")
TOO_FEW = r"^error.*too few bytes have been announced|^deadlock.*bytes more have come than were announced"
UNDER_COPY = r"^race.*[QKV]_smem.*copies to it"
HANGS = r"^deadlock.*mbarrier_wait"

# The block's barrier replaced by mbarriers that give buffers back, and its bug
EMPTY = "mbarrier_wait(empty_smem + (t + 1) % 2, t / 2 % 2 ^ 1);"
GIVE_BACK = "      __syncwarp();\n      if (lane == 0) mbarrier_arrive(empty_smem + t % 2);\n"
PRODUCT = "          mma_m16n16k16(O_reg[2 * n], O_reg[2 * n + 1], P_frag, V_frag);\n        }\n      }\n"
RING = changes(
    ("The mbarrier does not know that all are\n// done with it: the block's barrier stays.\n",
     "All warps arrive at another mbarrier\n"
     "// when they are done with it, and thread 0 alone waits for them:\n//\n"
     "//   empty[t % 2]       phase t / 2 is complete when all warps are done with the t-th K_j and V_j\n"),
    ("(V_smem + 2 * Bc * pitch);     // for each buffer\n",
     "(V_smem + 2 * Bc * pitch);     // for each buffer\n"
     "  uint64_t* empty_smem = arrived_smem + 2;  // the same\n"),
    ("    mbarrier_init(arrived_smem + 1, 1);\n",
     "    mbarrier_init(arrived_smem + 1, 1);\n"
     "    mbarrier_init(empty_smem, warps);\n    mbarrier_init(empty_smem + 1, warps);\n"),
    (WAIT + BARRIER, WAIT.rstrip() + "                    // K_j and V_j are there\n"),
    ("      if (threadIdx.x == 0 && t + 1 < tiles.end) load_tiles(t + 1);      "
     "// to where the last K_j and V_j were\n",
     "      if (threadIdx.x == 0 && t + 1 < tiles.end) {                       "
     f"// to where the last K_j and V_j were\n        {EMPTY}          // the phase before\n"
     "        load_tiles(t + 1);\n      }\n"),
    (PRODUCT, PRODUCT + GIVE_BACK),
    ("pitch + 2 * sizeof(uint64_t);", "pitch + 4 * sizeof(uint64_t);"))

EXERCISES = [
    Exercise(
        number=33, name="panel_index", title="Where the engine puts an element", lesson="12",
        direction="fwd", stage="tma", sections=("an index in panels",), common=("tma.cuh",),
        score=("wavefronts",), at_most={"wavefronts": 1.05}, probes=(WHOLE_CHUNKS,),
        specification="""
Write what panel_index(row, col, tile_rows) of stages/common/tma.cuh returns, which stands in this file:
where the element (row, col) of a tile is, counted in elements from the tile's start. The tile has tile_rows
rows, and `panels` panels of `panel` columns each (64). The copy engine has put it there, one box a panel:

  panels         one after the other: the second one comes after all rows of the first
  in a panel     rows of 64 elements, 128 bytes, without gaps
  in a row       chunks of 8 elements, 16 bytes, which stay whole: in row r, chunk c is at c ^ r % 8

In exercise 16 a tile was right in any arrangement, as the same function wrote and read it. Here the
hardware writes.
""",
        hints=(
            "Three questions, one term of a sum each: which panel, and how many elements are before it? "
            "Which row of it? Which column, of the 64 that it has?",
            "Columns within a panel are col % panel. The chunk's number is in which bits of that? A "
            "number of the row is xored to them.",
            "A panel has tile_rows * panel elements. % and * go before ^, and so does +, hence the "
            "parentheses."),
        mutants=(
            wrong("rows of all panels side by side, as in stage swizzle", r"^wrong result.*side by side",
                  (INDEX, "return row * panel * panels + (col ^ row % 8 * 8);"), right_on_randn=True),
            wrong("all columns in the first panel", r"^wrong result.*looked for in the first panel",
                  (INDEX, "return row * panel + (col % panel ^ row % 8 * 8);"), right_on_randn=True),
            wrong("no swizzle", r"^wrong result.*without the swizzle",
                  ("(col % panel ^ row % 8 * 8)", "col % panel")),
            wrong("row / 8", r"^wrong result.*by row / 8",
                  ("(col % panel ^ row % 8 * 8)", "(col % panel ^ row / 8 % 8 * 8)")),
            wrong("half of the rows", r"^wrong result.*by row % 4",
                  ("(col % panel ^ row % 8 * 8)", "(col % panel ^ row % 4 * 8)")),
            wrong("panels of 64 rows", r"^(race|uninitialised|out of bounds).*K_smem",
                  ("col / panel * tile_rows * panel", "col / panel * panel * panel"), right_on_randn=True),
            wrong("the column is not taken within its panel", r"^(race|uninitialised|out of bounds).*K_smem",
                  ("(col % panel ^", "(col ^"), right_on_randn=True),
            wrong("chunks without what is in them", r"^wrong result.*loses its place in its chunk",
                  ("(col % panel ^ row % 8 * 8)", "(col % panel / 8 ^ row % 8) * 8"), right_on_randn=True),
            wrong("elements, not chunks", r"^error.*multiple of 16 bytes",
                  ("(col % panel ^ row % 8 * 8)", "(col % panel ^ row % 8)")),
            wrong("all bits of the row", r"^(race|uninitialised|out of bounds).*K_smem",
                  ("(col % panel ^ row % 8 * 8)", "(col % panel ^ row * 8)")),
        )),
    Exercise(
        number=34, name="arrived", title="Bytes, boxes and a parity", lesson="12", direction="fwd",
        stage="tma", sections=("bytes and boxes", "the head of a tile"), score=("hbm", "barriers"),
        at_most={"hbm": 1, "barriers": 1},
        specification="""
The copy engine brings K_j and V_j of the t-th tile to buffer t % 2 of K_smem and of V_smem, a buffer being
Bc * pitch elements. j is tiles[t]. Q_i comes along with the first tile. arrived_smem has an mbarrier for
each buffer, of one arrival a phase.

First blank, load_tiles(t), which one thread calls: arrive at the buffer's mbarrier, once, and say how many
bytes its phase waits for; then ask for K_j and V_j, and for Q_i if t is 0.

Second blank, what all threads do at the head of a tile: K_j and V_j must be there; and nobody may still be
reading the buffers that tile t + 1 goes to.

Given, in stages/common: mbarrier_arrive_expect(barrier, bytes), mbarrier_wait(barrier, parity)
(hopper.cuh), and

  load_panels(to, map, barrier, rows, first_row, head, batch)      (tma.cuh)

The maps are Q_map, K_map and V_map; Q_i begins at row i * Br of query head h, K_j and V_j at row j * Bc of
key head h_kv, all of batch element b. A box counts whole, with the zeros that are past the end: so a tile
of K or of V has tile_bytes bytes, and Q_i Br * pitch elements. The check counts the barriers of the block:
one a tile.
""",
        hints=(
            "How often has the buffer's mbarrier been used before the t-th tile? Its phases are 0, 1, "
            "2, ...: which one is this tile's, and which parity has it?",
            "The bytes: two tiles of keys, always; Br * pitch elements of sizeof(ELEMENT) bytes more in "
            "the phase that Q_i comes in.",
            "mbarrier_wait says that the engine is done, and nothing of other threads. What says that "
            "they are done with the last tile?",
            "The buffer's mbarrier is arrived_smem + t % 2: one mbarrier_arrive_expect, and two or "
            "three calls of load_panels. At the head: phase t / 2, so the parity is t / 2 % 2."),
        mutants=(
            wrong("the first parity for ever", UNDER_COPY, (WAIT, WAIT.replace("t / 2 % 2", "0")),
                  right_on_randn=True),
            wrong("the number of the phase, not its parity", r"^error.*a parity of 2; 0 and 1 are possible",
                  (WAIT, WAIT.replace("t / 2 % 2", "t / 2")), right_on_randn=True),
            wrong("a column has d elements, not whole panels", TOO_FEW,
                  (BYTES, "2 * sizeof(ELEMENT) * Bc * d + (t == 0 ? sizeof(ELEMENT) * Br * d : 0)"),
                  right_on_randn=True),
            wrong("rows past the end do not count", TOO_FEW,
                  (BYTES, "2 * sizeof(ELEMENT) * min(Bc, p.N_k - tiles[t] * Bc) * pitch +\n"
                          "        (t == 0 ? sizeof(ELEMENT) * Br * pitch : 0)"), right_on_randn=True),
            wrong("Q's bytes are forgotten", TOO_FEW, (BYTES, "2 * tile_bytes")),
            wrong("Q's bytes are expected with each tile", HANGS,
                  (BYTES, "2 * tile_bytes + sizeof(ELEMENT) * Br * pitch")),
            wrong("V's bytes are forgotten", TOO_FEW, (BYTES, BYTES.replace("2 * tile", "tile"))),
            wrong("elements for bytes", TOO_FEW,
                  (BYTES, "2 * Bc * pitch + (t == 0 ? Br * pitch : 0)")),
            wrong("the parity of the tile", UNDER_COPY, (WAIT, WAIT.replace("t / 2 % 2", "t % 2"))),
            wrong("the phase before", UNDER_COPY, (WAIT, WAIT.replace("t / 2 % 2", "t / 2 % 2 ^ 1"))),
            wrong("one mbarrier for both buffers", HANGS,
                  ("uint64_t* arrived = arrived_smem + t % 2;\n", "uint64_t* arrived = arrived_smem;\n")),
            wrong("no arrival", HANGS, (EXPECT, "")),
            wrong("no barrier: who is done with the last tile?", UNDER_COPY, (BARRIER, "")),
            wrong("no wait: a barrier knows nothing of the engine", UNDER_COPY, (WAIT, "")),
            wrong("the buffer of the last tile", r"^(race|wrong result|uninitialised).*K_smem",
                  (OF_K, OF_K.replace("K_smem + t % 2", "K_smem + (t + 1) % 2"))),
            wrong("h for h_kv", r"^wrong result.*K and V are asked for by the query head",
                  (OF_K, OF_K.replace("h_kv", "h")), (OF_V, OF_V.replace("h_kv", "h"))),
            wrong("row j", r"^wrong result.*boxes of K begin at row j",
                  (OF_K, OF_K.replace("tiles[t] * Bc", "tiles[t]"))),
            wrong("a second barrier", r"^too many barriers", (BARRIER, BARRIER + "      __syncthreads();\n"),
                  right_on_randn=True),
            wrong("Q with each tile", r"^(race.*Q_smem|too much traffic)",
                  (OF_Q, OF_Q.replace("if (t == 0) ", "")),
                  (BYTES, "2 * tile_bytes + sizeof(ELEMENT) * Br * pitch")),
        )),
    Exercise(
        number=35, name="hangs_at_129", title="Hangs from 129 keys on", lesson="12", direction="fwd",
        stage="tma",
        specification=f"""
A colleague writes: "The block's barrier makes all warps wait for the slowest one, in each tile. But only
thread 0 must know that all are done with a buffer. So I took the barrier out: each warp arrives at an
mbarrier when it is done with a tile, and thread 0 waits for that before it asks for the next tile to the
same buffer. For the first two tiles there is nothing to wait for, and parity 1 of a new mbarrier lets it
pass. With up to 128 keys O and L are right. With 129 it hangs."
{LOOK}  q, k, v = torch.randn(3, 1, 2, 129, 64, dtype=torch.bfloat16)
  flash.attention(q, k, v, stage=Path("mine/35_hangs_at_129.cuh"))

No barrier of the block needs to come back.
""",
        hints=(
            "The simulator says who waits at which line, for which parity, and in which phase that "
            "mbarrier is. Which wait is it that nobody will ever end?",
            "Make a table: for t = 0 to 4, tile t + 1 goes to which buffer? Which tile had it before? "
            "In which phase of its mbarrier is it given back? Which parity has that, and which one is "
            "waited for?",
            "The use of a buffer is counted for `arrived` and for `empty` alike: by the number of the "
            "tile that is in it, or is to come to it, divided by 2. Which tile is that here?"),
        answer=paragraphs("""
The wait is about tile t + 1, which goes to the buffer (t + 1) % 2: its use number n = (t + 1) / 2. So it
must wait for phase n - 1 of `empty`, of parity (t + 1) / 2 % 2 ^ 1. The colleague counted with t: t / 2 % 2
^ 1. For even t that is the same. For odd t it is the other parity.

With t = 1, tile 2 goes to buffer 0. Phase 0 of empty[0] must be complete, and is as soon as all warps are
done with tile 0. But the wait is for parity 1, of phase 1: that is complete when all are done with tile 2,
which nobody asks for before. Up to 128 keys there is no tile 2.

Had a warp been late, and still in tile 0 then, phase 0 would be under way; and a wait for parity 1 ends at
once, as if it were the phase before. Then the engine overwrites what that warp reads. So on a GPU a wrong
parity may hang on one day, and give wrong numbers on another one."""),
        broken=RING,
        mutants=(
            unmended(HANGS, right_on_randn=True),
            mending("no wait: nothing hangs", UNDER_COPY,
                    (f"        {EMPTY}          // the phase before\n", ""), right_on_randn=True),
            mending("the parity of this phase", HANGS, (EMPTY, EMPTY.replace(" ^ 1", ""))),
            mending("the right tile, and the parity of this phase", HANGS,
                    (EMPTY, EMPTY.replace("t / 2 % 2 ^ 1", "(t + 1) / 2 % 2"))),
            mending("parity 1 for ever", HANGS, (EMPTY, EMPTY.replace("t / 2 % 2 ^ 1", "1"))),
            mending("the mbarrier of the other buffer", UNDER_COPY,
                    (EMPTY, EMPTY.replace("(t + 1) % 2", "t % 2")), right_on_randn=True),
            mending("the right wait, after the copy has been asked for", UNDER_COPY,
                    (f"        {EMPTY}          // the phase before\n        load_tiles(t + 1);\n",
                     f"        load_tiles(t + 1);\n        {EMPTY.replace('t / 2', '(t + 1) / 2')}\n"),
                    right_on_randn=True),
            mending("the right wait, and buffers that are given back before P V", UNDER_COPY,
                    (GIVE_BACK, ""), (EMPTY, EMPTY.replace("t / 2", "(t + 1) / 2")),
                    ("      #pragma unroll\n      for (int k = 0; k < Bc / 16; k++) { ",
                     GIVE_BACK + "      #pragma unroll\n      for (int k = 0; k < Bc / 16; k++) { "),
                    right_on_randn=True),
            mending("the right wait, and a lane that speaks for its warp too early", UNDER_COPY,
                    ("      __syncwarp();\n", ""), (EMPTY, EMPTY.replace("t / 2", "(t + 1) / 2")),
                    right_on_randn=True),
            mending("all lanes arrive, and the phases run ahead", f"{HANGS}|{UNDER_COPY}",
                    ("      if (lane == 0) mbarrier_arrive(", "      mbarrier_arrive("),
                    (EMPTY, EMPTY.replace("t / 2", "(t + 1) / 2"))),
            mending("half of the arrivals for one of the buffers", f"{HANGS}|{UNDER_COPY}",
                    ("mbarrier_init(empty_smem, warps);\n", "mbarrier_init(empty_smem, warps / 2);\n")),
        )),
]
