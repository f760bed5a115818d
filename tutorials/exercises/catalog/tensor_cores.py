"""Exercises over registers, tensor cores and copies: lessons 06 to 09."""

from ..exercise import Exercise
from ..probes import Probe
from .forward import wrong

LARGE = {"Br": 128, "Bc": 64}  # 8 x 8 numbers of S a thread

OUTER_PRODUCT = "add_outer_product(S_reg, query, key);"
LOAD_Q = "load(query, Q_smem + k * Br, first_row, 16, swizzle_of(k));"
LOAD_K = "load(key, K_smem + k * Bc, first_col, 32, swizzle_of(k));"
STORE_P = "store4(P_smem + x * Br + (row_of(r) ^ P_swizzle(lane_col8())),"

# At the head of a tile of cp_async
WAIT = "    cp_async_wait<0>();\n"
BARRIER = ("    __syncthreads();                        "
           "// K_j and V_j are there; and all are done with the last ones\n")
BUFFERS = "    const int buffer = t % 2 * Bc * pitch, next_buffer = (t + 1) % 2 * Bc * pitch;"
COPY_V = "      copy_tile<threads>(V_smem + next_buffer, tile_index, V, p.V.stride_n, next, Bc, p.N_k);\n"
COMMIT = COPY_V + "      cp_async_commit();"
NEXT_TILE = """\
    if (t + 1 < tiles.end) {                // to where the last K_j and V_j were
      const int next = tiles[t + 1] * Bc;
      copy_tile<threads>(K_smem + next_buffer, tile_index, K, p.K.stride_n, next, Bc, p.N_k);
      copy_tile<threads>(V_smem + next_buffer, tile_index, V, p.V.stride_n, next, Bc, p.N_k);
      cp_async_commit();
    }
"""

# Reads of what the copies bring for the next tile, just before P V: they must race with the copies.
UNDER_WAY = Probe(
    "for (int k = 0; k < Bc / 16; k++) {",
    """
for (int k = 0; k < Bc / 16; k++) {
if (k == 0 && t + 1 < tiles.end) {
  const int probed = (t + 1) % 2 * Bc * pitch + tile_index(threadIdx.x / 8, threadIdx.x % 8 * 8);
  if (float(K_smem[probed]) + float(V_smem[probed]) == 12345.f) return;
}
""",
    "The result is right, but nothing overlaps: when the product P V_j begins, the copies of the "
    "next tile are not under way. Each has been waited for already, or has not been started. The point of "
    "cp.async is that the products run meanwhile: start the copies after S is made, and wait for them at the "
    "head of the next tile.",
    under_way=("K_smem", "V_smem"))

WHOLE_CHUNKS = Probe(
    "const Mask mask(p, b, h);",
    """
const Mask mask(p, b, h);
for (int row = 0; row < 8; row++) for (int col = 0; col < pitch; col++)
  if (swizzled(row, col, pitch) != swizzled(row, col / 8 * 8, pitch) + col % 8) return;
""",
    "The stage's result is right, as it asks for the first element of a chunk only. But an element loses its "
    "place in its chunk: swizzled(row, col, pitch) must be col % 8 more than where the chunk begins, and the "
    "chunk stays whole.")

EXERCISES = [
    Exercise(
        number=12, name="register_tile", title="A tile of S in registers", lesson="06", direction="fwd",
        stage="conflict_free", sections=("S_ij, from Q_smem and K_smem",), tiles=LARGE, score=("wavefronts",),
        at_most={"wavefronts": 1.05},
        specification="""
Compute S_ij = Q_i K_j^T; it is scaled later. S_reg[r][c] is 0, and must become the product of row row_of(r)
of Q_i with key col_of(c): the sum over all d columns k. Here a thread has 8 x 8 of them.

Both tiles lie transposed: Q_smem is d x Br and K_smem is d x Bc, so that a row holds one k. Row and key are
not quite where you expect them. At k, column x is at

  x ^ swizzle_of(k)

A thread's rows come in fours, 16 apart, and its keys in fours, 32 apart: look at row_of and col_of. Use
load() (stages/common/vector.cuh) and add_outer_product() (stages/common/outer_product.cuh): for each k four
float4s and 64 multiplications.
Number by number the result is right, too, but shared memory needs many more wavefronts, and that is refused.
""",
        hints=(
            "One k gives an outer product: 8 numbers of Q, 8 numbers of K, each with each. What stays the "
            "same over all k, and which array adds up?",
            "load(to, row, first, step, swizzle): `row` is where the row of one k starts, `first` this "
            "thread's first row or key, `step` how far its second four is from the first. first_row and "
            "first_col are there.",
            "For k from 0 to d - 1: load query from Q_smem + k * Br, first_row, 16, swizzle_of(k); the keys "
            "likewise; then the outer product is added to S_reg. In the reference the loop is unrolled by "
            "8, so that swizzle_of(k) is known to the compiler."),
        mutants=(
            wrong("the keys without the swizzle", r"^wrong result.*K_smem is read without the swizzle",
                  (LOAD_K, LOAD_K.replace(", swizzle_of(k)", ""))),
            wrong("the queries without the swizzle", r"^wrong result.*Q_smem is read without the swizzle",
                  (LOAD_Q, LOAD_Q.replace(", swizzle_of(k)", ""))),
            wrong("both without it", r"^wrong result.*Q_smem and K_smem are read without the swizzle",
                  (LOAD_Q, LOAD_Q.replace(", swizzle_of(k)", "")),
                  (LOAD_K, LOAD_K.replace(", swizzle_of(k)", ""))),
            wrong("the step of the rows for the keys", r"^wrong result.*16 apart: they are 32 apart",
                  (LOAD_K, LOAD_K.replace("32", "16"))),
            wrong("the first 8 k only", r"^wrong result.*first 8 columns",
                  (LOAD_Q, LOAD_Q.replace("k * Br", "k % 8 * Br").replace("(k)", "(k % 8)")),
                  (LOAD_K, LOAD_K.replace("k * Bc", "k % 8 * Bc").replace("(k)", "(k % 8)"))),
            wrong("query and key exchanged", r"^wrong result.*query and key have changed places",
                  (OUTER_PRODUCT, "add_outer_product(S_reg, key, query);")),
            wrong("number by number", r"^too much traffic.*wavefronts.*excess is of [QK]_smem",
                  (LOAD_Q, "for (int r = 0; r < rows; r++) "
                   "query[r] = Q_smem[k * Br + (row_of(r) ^ swizzle_of(k))];"),
                  (LOAD_K, "for (int c = 0; c < cols; c++) "
                   "key[c] = K_smem[k * Bc + (col_of(c) ^ swizzle_of(k))];"), right_on_randn=True),
            wrong("the keys number by number", r"^too much traffic.*wavefronts.*excess is of K_smem",
                  (LOAD_K, "for (int c = 0; c < cols; c++) "
                   "key[c] = K_smem[k * Bc + (col_of(c) ^ swizzle_of(k))];"), right_on_randn=True),
            wrong("the first 64 k only", r"^wrong result.*first 64 columns",
                  ("for (int k = 0; k < d; k++) {\n      float query",
                   "for (int k = 0; k < min(d, 64); k++) {\n      float query"), right_on_randn=True),
        )),
    Exercise(
        number=13, name="P_store", title="P to shared memory without bank conflicts", lesson="06",
        direction="fwd", stage="conflict_free", sections=("the swizzle", "P, four numbers at a time"),
        tiles=LARGE, score=("wavefronts",), at_most={"wavefronts": 1.02},
        specification="""
P_smem is Bc x Br, transposed: a row holds one key. This thread has made P of its rows and keys, in
S_reg[r][c]. Its c-th key goes to row x of P_smem, which is given. Its rows of Q are columns there, row_of(r)
for the r-th, and come in fours side by side: store them four at a time, with store4
(stages/common/vector.cuh).

Stored plainly, rows of P_smem are Br floats apart, a multiple of 32 banks: so the same column of all rows is
in one bank. 16 bytes a lane are stored in four wavefronts, a quarter of the lanes in each: 8 lanes, of which
two share a row x and have float4s side by side, in four rows one after the other. That is a 4-way conflict.
So columns change places:

  column c of row x of P_smem is at c ^ P_swizzle(x)

Write the function P_swizzle(int x), with its first line, so that these 8 float4s fall into different banks;
and the store. P_swizzle(x) may depend on x % 8 only: the loop that reads P calls it with that, and x % 8 is
lane_col8() here. The result must be a multiple of 4 and less than 32. (Why?)
""",
        hints=(
            "32 banks are room for 8 float4s. Two of a row are side by side: 32 bytes, or 8 banks. How far "
            "must the next row move them?",
            "Rows x = 0, 1, 2, 3 need four different places for their 8 banks: 0, 8, 16 and 24.",
            "__device__ __forceinline__ int P_swizzle(int x) { return ...; }: x % 4 tells the four rows "
            "apart.",
            "The store goes to P_smem + x * Br + (row_of(r) ^ P_swizzle(lane_col8())), for r = 0, 4, ... "
            "below `rows`. ^ binds less than +: it needs the parentheses."),
        mutants=(
            wrong("no swizzle", r"^bank conflicts.*P_smem", ("return x % 4 * 8;", "return 0;"),
                    right_on_randn=True),
            wrong("a swizzle by 4 columns only", r"^bank conflicts.*P_smem",
                  ("return x % 4 * 8;", "return x % 4 * 4;"), right_on_randn=True),
            wrong("every other row only", r"^bank conflicts.*P_smem",
                  ("return x % 4 * 8;", "return x % 2 * 8;"), right_on_randn=True),
            wrong("columns, not groups of them", r"^misaligned", ("return x % 4 * 8;", "return x % 4;")),
            wrong("a function for the CPU", r"^does not compile.*P_swizzle\(\), which lacks __device__",
                  ("__device__ __forceinline__ int P_swizzle(int x) { return x % 4 * 8; }",
                   "inline int P_swizzle(int x) { return x % 4 * 8; }"), right_on_randn=True),
            wrong("a multiple of 32 banks", r"^bank conflicts.*P_smem",
                  ("return x % 4 * 8;", "return x % 2 * 32;"), right_on_randn=True),
            wrong("a plain store", r"^wrong result.*c \^ P_swizzle",
                  (STORE_P, "store4(P_smem + x * Br + row_of(r),")),
            wrong("the first four only", r"^uninitialised.*P_smem",
                  ("for (int r = 0; r < rows; r += 4)\n        store4(P_smem",
                   "for (int r = 0; r < 4; r += 4)\n        store4(P_smem")),
            wrong("number by number", r"^bank conflicts.*P_smem",
                  (f"{STORE_P}\n               "
                   "S_reg[r][c], S_reg[r + 1][c], S_reg[r + 2][c], S_reg[r + 3][c]);",
                   "for (int n = 0; n < 4; n++) P_smem[x * Br + (row_of(r + n) ^ P_swizzle(lane_col8()))] = "
                   "S_reg[r + n][c];")),
        )),
    Exercise(
        number=14, name="ldmatrix", title="Where lanes point ldmatrix to", lesson="07", direction="fwd",
        stage="mma", sections=("row and column",), score=("wavefronts", "barriers"), at_most={"barriers": 1},
        specification="""
ldmatrix_x4 brings four matrices of 8 x 8 elements. Lane 8 * i + r of the warp points to row r of matrix i,
and register i then holds matrix i, as the header draws a[0]. Give each lane its row and column within a block
of 16 x 16 in shared memory:

  Q_row, Q_col      a block of Q_smem, 16 rows of queries x 16 columns of k: A, registers a[0] to a[3]
  K_row, K_col      a block of K_smem, 16 keys x 16 columns of k
  V_row, V_col      a block of V_smem, 16 keys x 16 columns of O; each 8 x 8 is transposed on the way

K_frag and V_frag are the B of mma_m16n16k16 (stages/common/mma.cuh): its registers 0 and 1 are b[0] and b[1]
of the left 8 columns of B, 2 and 3 those of the right 8. B is K^T in the one product, and V in the other.
""",
        hints=(
            "Draw 16 x 16 as four blocks of 8 x 8 and write 0 to 3 into them: which one is register 0, 1, "
            "2, 3? lane / 8 says which block this lane points to, lane % 8 the row within it.",
            "A: a[1] is below a[0], a[2] to its right. So lanes 0 to 15 point to the rows 0 to 15 of the "
            "left half, lanes 16 to 31 to those of the right half.",
            "B = K^T has the 8 columns of k upright that lie in a row of K. b[0] and b[1] are k 0 to 7 and "
            "k 8 to 15 of the same 8 keys: in K_smem side by side.",
            "B = V has its rows where V_smem has them: b[0] and b[1] are keys 0 to 7 and 8 to 15: in V_smem "
            "below each other, as in Q_smem."),
        mutants=(
            wrong("Q as K: a[1] taken for upper right", r"^wrong result.*16 x 16 of Q two blocks",
                  ("const int Q_row = lane % 16, Q_col = lane / 16 * 8;",
                   "const int Q_row = lane / 16 * 8 + lane % 8, Q_col = lane / 8 % 2 * 8;"),
                  ("const int V_row = Q_row, V_col = Q_col;",
                   "const int V_row = lane % 16, V_col = lane / 16 * 8;")),
            wrong("K as Q", r"^wrong result.*16 x 16 of K two blocks",
                  ("const int K_row = lane / 16 * 8 + lane % 8, K_col = lane / 8 % 2 * 8;",
                   "const int K_row = lane % 16, K_col = lane / 16 * 8;")),
            wrong("V as K", r"^wrong result.*16 x 16 of V two blocks",
                  ("const int V_row = Q_row, V_col = Q_col;", "const int V_row = K_row, V_col = K_col;")),
            wrong("keys in another order than the mask", r"^wrong result.*two halves have changed places",
                  ("const int K_row = lane / 16 * 8 + lane % 8,", "const int K_row = (lane / 16 * 8 + lane "
                                                                  "% 8) ^ 8,"),
                  ("const int V_row = Q_row,", "const int V_row = Q_row ^ 8,"), right_on_randn=True),
            wrong("a barrier to be safe", r"^too many barriers",
                  ("const int V_row = Q_row, V_col = Q_col;",
                   "const int V_row = Q_row, V_col = Q_col;\n  __syncthreads();"), right_on_randn=True),
            wrong("as if two matrices were asked for", r"^wrong result.*the last 8 are the first 8",
                  ("const int K_row = lane / 16 * 8 + lane % 8, K_col = lane / 8 % 2 * 8;",
                   "const int K_row = lane % 8, K_col = lane / 8 % 2 * 8;")),
            wrong("to the elements that the lane gets", r"^error.*multiple of 16 bytes",
                  ("const int Q_row = lane % 16, Q_col = lane / 16 * 8;",
                   "const int Q_row = lane / 4, Q_col = lane % 4 * 2;")),
        )),
    Exercise(
        number=15, name="P_fragment", title="P stays in registers", lesson="07", direction="fwd", stage="mma",
        sections=("from an accumulator to A", "its product with V_j"), common=("mma.cuh",),
        score=("wavefronts",),
        specification="""
S_reg holds P~ by now, in floats: S_reg[n] is this lane's part of the keys 8 n to 8 n + 7, laid out as D
(header). Add P~_ij V_j to O_reg, 16 keys at a time: step k is about the keys 16 k to 16 k + 15.

First blank, in to_A of stages/common/mma.cuh, which stands in this file: A of 16 x 16 for step k, from two
tiles of the accumulator, without shuffles. pack<ELEMENT>(x, y) rounds two neighbours of a row and puts them
into one register, the left one, x, in its lower half.

Second blank: for each 16 columns of O, n = 0, 1, ..., width / 16 - 1, get the block of V_smem that belongs to
k and n with one ldmatrix, by tile_index(), V_row and V_col, and multiply P_frag with it: mma_m16n16k16 takes
the left and the right half of a block of O_reg, which are two tiles of 8 columns.
""",
        hints=(
            "Which two tiles of S, 8 columns wide, are columns 16 k to 16 k + 15 of P?",
            "Compare D and A in the header, for lane 0: d[0] and d[1] stand where a[0] has its two "
            "elements. Where do d[2] and d[3] stand?",
            "A[0] and A[1] come from the tile 2 * k, upper and lower half; A[2] and A[3] from the tile 2 * "
            "k + 1.",
            "V: rows are keys, so the block starts at row 16 * k and column 16 * n of V_smem. A column of B "
            "crosses V's rows: ldmatrix_x4_trans. shared_address() turns a pointer into what it wants."),
        mutants=(
            wrong("a[1] taken for upper right", r"^wrong result.*16 x 16 of P two blocks",
                  ("A[2 * n] = pack<ELEMENT>", "A[n] = pack<ELEMENT>"),
                  ("A[2 * n + 1] = pack<ELEMENT>", "A[n + 2] = pack<ELEMENT>")),
            wrong("tiles k and k + 1", r"^wrong result.*tiles of S for step k are k and k \+ 1",
                  ("A[2 * n] = pack<ELEMENT>(acc[2 * k + n][0], acc[2 * k + n][1]);",
                   "A[2 * n] = pack<ELEMENT>(acc[k + n][0], acc[k + n][1]);"),
                  ("A[2 * n + 1] = pack<ELEMENT>(acc[2 * k + n][2], acc[2 * k + n][3]);",
                   "A[2 * n + 1] = pack<ELEMENT>(acc[k + n][2], acc[k + n][3]);")),
            wrong("high and low exchanged", r"^wrong result.*in every register of P",
                  ("(acc[2 * k + n][0], acc[2 * k + n][1])", "(acc[2 * k + n][1], acc[2 * k + n][0])"),
                  ("(acc[2 * k + n][2], acc[2 * k + n][3])", "(acc[2 * k + n][3], acc[2 * k + n][2])")),
            wrong("fp16 for every type", r"^wrong result.*\(L is right.\).*bf16",
                  ("A[2 * n] = pack<ELEMENT>", "A[2 * n] = pack<__half>"),
                  ("A[2 * n + 1] = pack<ELEMENT>", "A[2 * n + 1] = pack<__half>"), right_on_randn=True),
            wrong("64 columns of O", r"^wrong result.*only the first 64 columns",
                  ("for (int n = 0; n < width / 16; n++) {\n        uint32_t V_frag",
                   "for (int n = 0; n < min(4, width / 16); n++) {\n        uint32_t V_frag"),
                  right_on_randn=True),
            wrong("V without trans", r"^wrong result.*no 8 x 8 of V is transposed",
                  ("ldmatrix_x4_trans(V_frag", "ldmatrix_x4(V_frag")),
            wrong("V's rows and columns exchanged", r"^wrong result.*block of V for k and n",
                  ("tile_index(16 * k + V_row, 16 * n + V_col)",
                   "tile_index(16 * n + V_row, 16 * k + V_col)")),
            wrong("the tiles n and n + 1 of O", r"^wrong result.*block n of O is tiles n and n \+ 1",
                  ("mma_m16n16k16(O_reg[2 * n], O_reg[2 * n + 1], P_frag, V_frag);",
                   "mma_m16n16k16(O_reg[n], O_reg[n + 1], P_frag, V_frag);")),
        )),
    Exercise(
        number=16, name="swizzle", title="The swizzle", lesson="08", direction="fwd", stage="swizzle",
        sections=("its index",), common=("swizzle.cuh",), score=("wavefronts",),
        at_most={"wavefronts": 1.05}, probes=(WHOLE_CHUNKS,),
        specification="""
Write what swizzled(row, col, pitch) of stages/common/swizzle.cuh returns, which stands in this file: where
the element (row, col) of a tile is, counted in elements from the tile's start. A row has `pitch` elements, a
multiple of 64, and its elements stay within these. It consists of chunks of 8 elements, 16 bytes, which stay
whole. In row r, chunk c goes to the place that the header gives:

  c ^ r % 8

Everything in the stage goes through it: so any arrangement that loses no element gives the right result.
The check asks for all elements of a chunk. And ldmatrix reads one chunk each of 8 rows at a time, and these
must be in different banks. A plain tile, which stage mma has, is refused for its bank conflicts.
""",
        hints=(
            "col is an element, not a chunk. Which bits of col are the number of its chunk, and which its "
            "place within the chunk? Only the first may change.",
            "Chunk c starts at element 8 * c. What must be xored to col, so that c becomes c ^ r % 8?",
            "return row * pitch + (...); % and * go before ^, and so does +, hence the parentheses."),
        mutants=(
            wrong("a plain tile", r"^bank conflicts.*[QKV]_smem.*ldmatrix", ("(col ^ row % 8 * 8)", "col"),
                  right_on_randn=True),
            wrong("chunks without what is in them", r"^wrong result.*loses its place in its chunk",
                  ("(col ^ row % 8 * 8)", "(col / 8 ^ row % 8) * 8"), right_on_randn=True),
            wrong("elements, not chunks", r"^misaligned", ("(col ^ row % 8 * 8)", "(col ^ row % 8)")),
            wrong("all bits of the row", r"^out of bounds",
                  ("(col ^ row % 8 * 8)", "(col ^ row * 8)")),
            wrong("half of the rows", r"^bank conflicts.*[QKV]_smem.*ldmatrix",
                  ("(col ^ row % 8 * 8)", "(col ^ row % 4 * 8)")),
            wrong("every second row", r"^bank conflicts.*[QKV]_smem.*ldmatrix",
                  ("(col ^ row % 8 * 8)", "(col ^ row / 2 % 8 * 8)")),
            wrong("a rotation that leaves the row", r"^race.*[QKV]_smem",
                  ("(col ^ row % 8 * 8)", "(col + row % 8 * 8)")),
            wrong("padding, for which there is no room", r"^out of bounds",
                  ("row * pitch + (col ^ row % 8 * 8)", "row * (pitch + 8) + col")),
        )),
    Exercise(
        number=17, name="pipeline", title="Copies under way", lesson="09", direction="fwd", stage="cp_async",
        sections=("the head of a tile", "the next tile is on its way"),
        score=("hbm", "wavefronts", "barriers"), at_most={"barriers": 1}, probes=(UNDER_WAY,),
        specification="""
There are two buffers each for K and V: the t-th tile is in buffer t % 2 of K_smem and of V_smem. Its number
is j = tiles[t]; here that is t. Before the loop the copies of Q and of the first tile were started. Keep the
copies one tile in front of the products.

First blank, the head of a tile: whatever was copied for it must be there, whichever thread copied it; and
nobody may still be reading the buffers into which the next tile will go. Then define, as const int,

  buffer, next_buffer   how many elements after the start of K_smem (and of V_smem) tiles t and t + 1 are

A buffer has Bc * pitch elements.

Second blank, after S_ij is made: if t + 1 is before tiles.end, start to copy the Bc rows of K and of V of
tile tiles[t + 1], by copy_tile, to `next_buffer`; and make the copies a group that can be waited for.

cp_async_wait and cp_async_commit are explained in stages/common/ptx.cuh. A wait is for a thread's own copies.
The check looks whether copies are under way while P V_j is made, and counts the barriers: one a tile.
""",
        hints=(
            "Two things are needed at the head: one for this thread's copies, one for all threads. In which "
            "order?",
            "A barrier after the wait says two things at once: everybody's copies of tile t have arrived, "
            "and everybody has finished tile t - 1, whose buffers are those of tile t + 1.",
            "cp_async_wait<0>() waits for all groups of this thread. At the head only one is under way, "
            "that of tile t: with <1> it would not be waited for.",
            "copy_tile<threads>(K_smem + next_buffer, tile_index, K, p.K.stride_n, tiles[t + 1] * Bc, Bc, "
            "p.N_k), if t + 1 < tiles.end; V likewise; then cp_async_commit()."),
        mutants=(
            wrong("a wait right after the commit", r"^no overlap.*not under way",
                  (COMMIT, f"{COMMIT}\n      cp_async_wait<0>();"), right_on_randn=True),
            wrong("a copy at the head, and a wait for it", r"^no overlap.*not under way",
                  (NEXT_TILE, "    cp_async_commit();\n"), (BUFFERS, f"{BUFFERS}\n{NEXT_TILE}    "
                                                                     f"cp_async_wait<0>();"),
                  right_on_randn=True),
            wrong("a second barrier", r"^too many barriers", (BARRIER, f"{BARRIER}    __syncthreads();\n"),
                  right_on_randn=True),
            wrong("no wait", r"^race.*cp_async_wait", (WAIT + BARRIER, BARRIER)),
            wrong("a group may be under way", r"^race.*cp_async_wait",
                  (WAIT + BARRIER, "    cp_async_wait<1>();\n" + BARRIER)),
            wrong("no barrier", r"^race.*[QKV]_smem", (WAIT + BARRIER, WAIT)),
            wrong("the barrier before the wait", r"^race.*[QKV]_smem", (WAIT + BARRIER, BARRIER + WAIT)),
            wrong("one buffer for both", r"^race.*[KV]_smem",
                  ("next_buffer = (t + 1) % 2 * Bc * pitch;", "next_buffer = buffer;")),
            wrong("no commit", r"^race.*cp_async_wait",
                  (COMMIT, COPY_V)),
            wrong("the tile that is there already", r"^wrong result.*tile of keys is the one before",
                  ("const int next = tiles[t + 1] * Bc;", "const int next = j * Bc;")),
            wrong("K only", r"^uninitialised.*V_smem",
                  (COPY_V, "")),
        )),


]
