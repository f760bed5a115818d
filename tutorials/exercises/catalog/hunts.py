"""Bug hunts: stages that are broken on purpose, each by another kind of mistake."""

from ..cases import CAUSAL_SCORE
from ..exercise import Change, Exercise, Mutant
from .tensor_cores import UNDER_WAY


def changes(*pairs: tuple[str, str]) -> tuple[Change, ...]:
    return tuple(Change(*pair) for pair in pairs)


def paragraphs(text: str) -> str:
    """Each in one line, for a terminal to wrap."""
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))


def unmended(reason: str, right_on_randn: bool = False) -> Mutant:
    """The broken stage, with a change that changes nothing: what the checker says of the bug itself."""
    change = ("size_t workspace_bytes(", "inline size_t workspace_bytes(")
    return Mutant("nothing that matters", changes(change), reason, right_on_randn)


def mending(what: str, reason: str, *pairs: tuple[str, str], right_on_randn: bool = False) -> Mutant:
    """A change that does not mend it."""
    return Mutant(what, changes(*pairs), reason, right_on_randn)


LOOK = """
`check` runs a file once something in it has changed. To see the bug before that, in Python, from the
repository's folder:

  import torch, flash
  from pathlib import Path
"""

EXERCISES = [
    Exercise(
        number=18, name="fifty_keys", title="NaN below 64 keys", lesson="02", direction="fwd",
        stage="tiled",
        specification=f"""
A colleague writes: "O is right for 64 keys, for 65, 139 and 1000. With 63 keys or fewer it is NaN in the
simulator, and on my GPU right on some days and NaN on others. The keys past the end cannot matter:
load_tile makes their rows of V 0, and 0 times anything is 0. L is right in every call."
{LOOK}  q, k, v = torch.randn(1, 2, 75, 64), *torch.randn(2, 1, 2, 50, 64)
  with flash.inspect() as report:
      flash.attention(q, k, v, stage=Path("mine/18_fifty_keys.cuh"))
  print(report)
""",
        hints=(
            "Is 0 times anything 0? Which floats are there for which it is not?",
            "Which of the three kernels is it? S, P and L are right. So look at what output_kernel "
            "multiplies: two "
            "tiles in shared memory, of which one has a value for each key of the tile.",
            "Who writes the columns of P_smem from N_k on, when N_k is 50? And when it is 139, in which "
            "tile were "
            "they written before?"),
        answer=paragraphs("""
P_smem was written only where P has an element. What lies past row N_q or column N_k stayed what it was:
with several tiles of keys the number of the last tile, with one tile whatever the memory had before. The
product runs over all Bc columns, and multiplies that by a row of V_smem that is 0.

0 times a number is 0, so old numbers do no harm: hence "right for 65 and more". But 0 * NaN and 0 * inf are
NaN, and memory that nobody has written may hold any bits. The checker fills it with NaN, and reports the
first read. On a GPU the last kernel's numbers are there, on some days.

A tile is whole only if every element is written, also what is past the end: with 0, as load_tile does. The
other way is to stop the product at the last key."""),
        broken=changes(
            ("        P_smem[(warp * rows + r) * Bc + lane + 32 * c] =\n"
             "            row < p.N_q && col < p.N_k ? P[((int64_t)bh * p.N_q + row) * p.N_k + col] : 0.f;",
             "        if (row < p.N_q && col < p.N_k)\n"
             "          P_smem[(warp * rows + r) * Bc + lane + 32 * c] = "
             "P[((int64_t)bh * p.N_q + row) * p.N_k + col];")),
        mutants=(
            unmended(r"^uninitialised.*output_kernel.*P_smem", right_on_randn=True),
            mending("columns only: rows of P past the end are read", r"^out of bounds.*output_kernel",
                    ("        if (row < p.N_q && col < p.N_k)\n"
                     "          P_smem[(warp * rows + r) * Bc + lane + 32 * c] = "
                     "P[((int64_t)bh * p.N_q + row) * p.N_k + col];",
                     "        P_smem[(warp * rows + r) * Bc + lane + 32 * c] = "
                     "col < p.N_k ? P[((int64_t)bh * p.N_q + row) * p.N_k + col] : 0.f;"),
                    right_on_randn=True),
            mending("all of it is read: past a row's end is the next row", r"^out of bounds.*output_kernel",
                    ("        if (row < p.N_q && col < p.N_k)\n          P_smem", "        P_smem"),
                    right_on_randn=True),
            mending("nothing is added where V is 0: P_smem is read all the same", r"^uninitialised.*P_smem",
                    ("O_reg[r][c] += P_smem[(warp * rows + r) * Bc + col] * value;",
                     "{\n          const float P = P_smem[(warp * rows + r) * Bc + col];\n"
                     "          if (value != 0.f) O_reg[r][c] += P * value;\n        }"),
                    right_on_randn=True),
            mending("V_smem is guarded, and it was 0 already", r"^uninitialised.*P_smem",
                    ("const float value = lane + 32 * c < d ?",
                     "const float value = j * Bc + col < p.N_k && lane + 32 * c < d ?"), right_on_randn=True),
            mending("cleared without a barrier after it", r"^race.*output_kernel.*P_smem",
                    ("    load_tile(V_smem, d,",
                     "    for (int n = threadIdx.x; n < Br * Bc; n += threads) P_smem[n] = 0.f;\n"
                     "    load_tile(V_smem, d,")),
        )),
    Exercise(
        number=19, name="lengths", title="Only multiples of 32", lesson="01", direction="fwd", stage="naive",
        specification=f"""
A colleague writes: "With 64, 96 or 128 keys O and L are right. With 65 keys O is wrong, and
L is as large as 1e31 in places. With 139 keys Python itself ended: `free(): invalid
next size`. I changed nothing but N_k."

(So do not run this file in a session that you need. Under the checker it does no harm.)
{LOOK}  q, k, v = torch.randn(1, 2, 75, 64), *torch.randn(2, 1, 2, 139, 64)
  with flash.inspect() as report:
      flash.attention(q, k, v, stage=Path("mine/19_lengths.cuh"))
  print(report)

The checker puts red zones around each head of Q, K, V and O, and knows the first and the last row of each.
""",
        hints=(
            "Why multiples of 32? Look at the default tiles at the top of the file: how many threads have "
            "nothing to do when Bc divides N_k?",
            "The finding says which array, which index, and by how much it is past the end. Which variable "
            "is that index, and which values may it have?",
            "N_k keys have the numbers 0 to N_k - 1."),
        answer=paragraphs("""
`col > p.N_k` lets one column too many through: the keys are 0 to N_k - 1. If Bc divides N_k there is no
thread with col == N_k, so the mistake shows only with a ragged last tile.

The extra thread does two things. It reads K[N_k], which is the next head's first key, or memory that is
nobody's. And it writes S[row][N_k], which is the place of S[row + 1][0]: the next row's first score is
wrong, if this thread comes second. In the very last row it writes past the end of the scratch memory, which
is how Python's own memory was damaged.

How to find it: the checker's message has the array, the index and the line. Without it: try N = 31, 32, 33,
and look which rows and columns are wrong."""),
        broken=changes(("if (row >= p.N_q || col >= p.N_k) return;",
                        "if (row >= p.N_q || col > p.N_k) return;")),
        mutants=(
            unmended(r"^out of bounds.*\bK\b", right_on_randn=True),
            mending("more scratch memory, so that nothing is written past its end", r"^out of bounds.*\bK\b",
                    ("return sizeof(float) * p.B * p.H * p.N_q * p.N_k; }",
                     "return sizeof(float) * (p.B * p.H * p.N_q * p.N_k + 1); }"), right_on_randn=True),
            mending("the write is guarded, and the read is not", r"^out of bounds.*\bK\b",
                    ("  S[((int64_t)bh * p.N_q + row) * p.N_k + col] = visible",
                     "  if (col < p.N_k) S[((int64_t)bh * p.N_q + row) * p.N_k + col] = visible"),
                    right_on_randn=True),
            mending("the read is guarded, and the write is not", r"^(race|out of "
                                                                 r"bounds).*scores_kernel",
                    ("K[col * p.K.stride_n + k]", "K[min(col, p.N_k - 1) * p.K.stride_n + k]")),
            mending("the score is masked: it is written all the same",
                    r"^(race|out of bounds).*scores_kernel",
                    ("const bool visible = !CAUSAL || col <= row + p.diagonal;",
                     "const bool visible = col < p.N_k && (!CAUSAL || col <= row + p.diagonal);")),
        )),
    Exercise(
        number=20, name="stopped", title="Stopped at 75 keys", lesson="05", direction="bwd",
        stage="recompute",
        specification=f"""
A colleague writes: "I made the backward pass a little faster for ragged lengths, by leaving out what need
not be done. With 64 or 128 keys all gradients are right. With 75 the simulator stops, and shows a list of
threads."
{LOOK}  q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 75, 64))
  flash.attention(q, k, v, backward=Path("mine/20_stopped.cuh")).square().sum().backward()

The message says which threads wait where. Which lanes of a warp are these? And which columns of the tile do
they have, if N_k is 75?
""",
        hints=(
            "Two barriers are named. What does each wait for: threads of the block, or lanes of a warp?",
            "Which path through the loop over r does not lead past the first of the two? A lane that takes "
            "it waits at the second, and the others of its warp wait for it at the first.",
            "Let all lanes of a warp take the same path. Then ask what else a lane without a key has to do: "
            "the products after the next barrier run over all Bc columns of the tile."),
        answer=paragraphs("""
A `continue` stood before a __syncwarp(): lanes whose column is past N_k went on to the __syncthreads()
after the loop. There they waited for all threads of the block, and the other lanes of their own warp waited
for them at the __syncwarp(): a deadlock, on a GPU as in the simulator. All lanes of a mask must reach the
same __syncwarp(), and all threads of a block the same __syncthreads(), unless they have returned from the
kernel: those are no longer waited for.

To leave the __syncwarp() out, or to move it before the `continue`, does not mend it. Columns past N_k are
columns of P and dS, too: dK, dV and dQ are sums over whole tiles, and these columns must hold zeros. Nobody
else writes them: they keep what was in shared memory before, NaN in the simulator.

What a lane may leave out is work whose result nobody reads, between two barriers: as in `if (row >= p.N_q)
continue` where dQ is stored."""),
        broken=changes(
            ("        const int row = i * Br + warp * rows + r;\n"
             "        const float L_row",
             "        const int row = i * Br + warp * rows + r;\n"
             "        if (j * Bc + lane >= p.N_k) continue;\n"
             "        const float L_row"),
            ("mask.through_score(dS, x, row, col);\n        }\n",
             "mask.through_score(dS, x, row, col);\n        }\n"
             "        __syncwarp();                     // the warp has this row of P and dS\n")),
        mutants=(
            unmended(r"^deadlock.*__syncthreads.*__syncwarp", right_on_randn=True),
            mending("no __syncwarp(): the columns past N_k are still not written",
                    r"^uninitialised.*(P_smem|dS_smem)",
                    ("        __syncwarp();                     // the warp has this row of P and dS\n", ""),
                    right_on_randn=True),
            mending("the __syncwarp() first", r"^uninitialised.*(P_smem|dS_smem)",
                    ("        __syncwarp();                     // the warp has this row of P and dS\n", ""),
                    ("        if (j * Bc + lane >= p.N_k) continue;\n",
                     "        __syncwarp();\n        if (j * Bc + lane >= p.N_k) continue;\n")),
            mending("break instead", r"^deadlock.*__syncthreads.*__syncwarp",
                    ("if (j * Bc + lane >= p.N_k) continue;", "if (j * Bc + lane >= p.N_k) break;")),
            mending("a barrier in the branch: another one than the others wait at",
                    r"^(barrier|deadlock|uninitialised)",
                    ("if (j * Bc + lane >= p.N_k) continue;",
                     "if (j * Bc + lane >= p.N_k) {\n"
                     "          __syncwarp();\n          continue;\n        }")),
            mending("a barrier of the block instead: lanes are at two", r"^(barrier|deadlock)",
                    ("        __syncwarp();                     // the warp has",
                     "        __syncthreads();                  // the warp has")),
        )),
    Exercise(
        number=21, name="in_the_model", title="Wrong in the model only", lesson="05", direction="bwd",
        stage="recompute",
        specification=f"""
A colleague writes: "In my test all gradients are right, for every length, mask and scale. In my model O is
right, but dQ, dK and dV are wrong from the second row on. There q, k and v come from one matrix product of
shape (B, N, H, d), and I swap N and H by transpose(1, 2). If I add .contiguous(), all is right again; but
that copies, and the other stages do not need it."
{LOOK}  q, k, v = (x.transpose(1, 2).requires_grad_() for x in torch.randn(3, 1, 64, 2, 64))
  with flash.inspect() as report:
      flash.attention(q, k, v, backward=Path("mine/21_in_the_model.cuh")).sum().backward()
  print(report)
""",
        hints=(
            "transpose moves no number. What does it change in the tensor?",
            "x.stride() of q, and of the gradient of O that autograd passes: from one row to the next, how "
            "many "
            "elements is it in each? p.Q and p.dO have that as stride_n.",
            "The finding names an array and a line. Read all arguments of that call, and compare with its "
            "neighbours."),
        answer=paragraphs("""
The tile of dO was loaded with p.Q.stride_n. A tensor says itself how far its rows are apart, and here no two
need agree: q is a view of (B, N, H, d), with rows H * d apart, and dO comes from autograd as it likes, here
with rows d apart.

With tensors straight from torch.randn all strides are d, so any of them will do, and a test sees nothing.
Row 0 begins at 0 with every stride: hence "from the second row on". The checker has red zones around each
head, so that a row past the end of dO is out of bounds, even where the memory is there.

Tests should have tensors whose strides all differ: transposed ones, and slices of wider ones."""),
        broken=changes(("p.dO.head(b, h), p.dO.stride_n, i * Br", "p.dO.head(b, h), p.Q.stride_n, i * Br")),
        mutants=(
            unmended(r"^out of bounds.*\bdO\b.*stride_n", right_on_randn=True),
            mending("as if there were no gaps", r"^(out of bounds.*\bdO\b|wrong result).*stride_n",
                    ("p.dO.head(b, h), p.Q.stride_n, i * Br", "p.dO.head(b, h), d, i * Br"),
                    right_on_randn=True),
            mending("O's: dO has its shape, and strides of its own", r"^(out of bounds.*\bdO\b|wrong "
                                                                     r"result).*stride_n",
                    ("p.dO.head(b, h), p.Q.stride_n, i * Br", "p.dO.head(b, h), p.O.stride_n, i * Br"),
                    right_on_randn=True),
            mending("dQ's, which is Q's", r"^out of bounds.*\bdO\b.*stride_n",
                    ("p.dO.head(b, h), p.Q.stride_n, i * Br", "p.dO.head(b, h), p.dQ.stride_n, i * Br"),
                    right_on_randn=True),
            mending("Q by that of dO as well", r"^(out of bounds.*\bQ\b|wrong result|misaligned).*stride_n",
                    ("p.Q.head(b, h), p.Q.stride_n, i * Br", "p.Q.head(b, h), p.dO.stride_n, i * Br"),
                    ("p.dO.head(b, h), p.Q.stride_n, i * Br", "p.dO.head(b, h), p.dO.stride_n, i * Br"),
                    right_on_randn=True),
        )),
    Exercise(
        number=22, name="two_heads", title="One head is right, two are not", lesson="03", direction="fwd",
        stage="online_softmax",
        specification=f"""
A colleague writes: "B=1, H=1 is right for every length. With two heads both O and L are wrong, by other
amounts in every run. If I let the simulator run one block at a time (FLASH_SIM_THREADS=1 python ...), all
is right; so it must be the simulator." It is not.
{LOOK}  q, k, v = torch.randn(3, 1, 2, 128, 64)
  with flash.inspect() as report:
      flash.attention(q, k, v, stage=Path("mine/22_two_heads.cuh"))
  print(report)
""",
        hints=(
            "A block is a head. What can one block do to another one? Which memory do both of them see?",
            "The scratch memory holds m and l of all rows of all heads: 2 * B * H * N_q floats. Which part "
            "of it belongs to head bh of the B * H?",
            "Follow the index of each access from launch() to the line that the finding names. One pointer "
            "is moved to this head's rows; look for the other one."),
        answer=paragraphs("""
Every head used the rows of l that belong to head 0: m is moved by bh * N_q, and l was not. Blocks of
different heads overwrote each other's sums. m was right.

"One head is right" says that heads meet somewhere. "One block at a time is right" says that they meet in
memory that a block sets, uses and no longer needs afterwards; it does not say that the program is right: on
a GPU as many blocks run at once as there is room for. The checker does not depend on luck here. It reports
two blocks that access one address, one of them writing: blocks of a launch have no order, whatever the
order was this time."""),
        broken=changes(("  m += (int64_t)bh * p.N_q;\n  l += (int64_t)bh * p.N_q;",
                        "  m += (int64_t)bh * p.N_q;")),
        mutants=(
            unmended(r"^race.*online_softmax_kernel.*\(m, l\).*block"),
            mending("moved by the head, and not by the batch element", r"^race.*\(m, l\)",
                    ("  m += (int64_t)bh * p.N_q;",
                     "  m += (int64_t)bh * p.N_q;\n  l += (int64_t)h * p.N_q;")),
            mending("moved by keys, not by rows", r"^(out of bounds|race).*\(m, l\)",
                    ("  m += (int64_t)bh * p.N_q;",
                     "  m += (int64_t)bh * p.N_q;\n  l += (int64_t)bh * p.N_k;"), right_on_randn=True),
            mending("rows up to whole tiles: there is no memory for them", r"^(race|out of bounds).*\(m, l\)",
                    ("  m += (int64_t)bh * p.N_q;",
                     "  m += (int64_t)bh * Tr * Br;\n  l += (int64_t)bh * Tr * Br;"), right_on_randn=True),
            mending("by one row", r"^race.*\(m, l\)",
                    ("  m += (int64_t)bh * p.N_q;", "  m += (int64_t)bh * p.N_q;\n  l += bh;")),
            mending("a barrier: it orders the threads of one block", r"^race.*\(m, l\)",
                    ("      l[row] = 0.f;\n    }\n  }\n",
                     "      l[row] = 0.f;\n    }\n  }\n  __threadfence();\n  __syncthreads();\n")),
        )),
    Exercise(
        number=23, name="slow", title="Right, but slow", lesson="04", direction="fwd", stage="flash2",
        specification=f"""
A colleague writes: "I tidied flash2 up, and removed an odd number. All results are the same, bit by bit.
But now it takes much longer on a GPU; HBM traffic and the number of multiplications are what they were."
{LOOK}  q, k, v = torch.randn(3, 1, 2, 128, 64)
  with flash.inspect() as report:
      flash.attention(q, k, v, stage=Path("mine/23_slow.cuh"))
  print(report)

The report lists the accesses to shared memory by line, with their wavefronts and the least possible number
of them. report.plot("lanes.png", line="23_slow.cuh:NN"), with the number of a line, draws which lane reads
which bank.
""",
        hints=(
            "A wavefront serves 32 banks of 4 bytes, one number of each. Which line takes many times the "
            "least possible number?",
            "In that line lane t reads row t of the tile, and all lanes the same column k. Which bank is "
            "K_smem[t * pitch + k] in, if the pitch is 64? If it is 40?",
            "Two rows are in different banks for all 32 lanes if the pitch is odd. More memory must then be"
            " asked for, and what comes after K_smem must move."),
        answer=paragraphs("""
K's rows lay d floats apart. In Q K^T the lanes read the same k of 32 rows: addresses t * d + k. With d = 64
all of these are in one bank of the 32, and the load takes 32 wavefronts instead of one. With rows d + 1
apart the banks are t * (d + 1) + k mod 32, and as d + 1 is odd, they are all different.

The padding has four places: where the tile is loaded, where it is read, where the next array begins, and
how many bytes the launch asks for. If one of them is forgotten, the result is wrong or the checker reports
a race between two arrays. (`shared:` at the top of the file counted it all the time.)

Such a bug shows in no test of results. It shows in wavefronts, here or in a GPU's profiler."""),
        broken=changes(
            ("// Bc x d, rows d + 1 apart\n  float* V_smem = K_smem + Bc * (d + 1);",
             "// Bc x d\n  float* V_smem = K_smem + Bc * d;"),
            ("load_tile(K_smem, d + 1, p.K", "load_tile(K_smem, d, p.K"),
            ("K_smem[(lane + 32 * c) * (d + 1) + k]", "K_smem[(lane + 32 * c) * d + k]"),
            ("Br * d + Bc * (d + 1) + Bc * d + Br * Bc", "Br * d + 2 * Bc * d + Br * Bc")),
        score=("wavefronts",), at_most={"wavefronts": 1.05},
        mutants=(
            unmended(r"^bank conflicts.*wavefronts", right_on_randn=True),
            mending("an even pitch: two lanes a bank", r"^bank conflicts",
                    ("V_smem = K_smem + Bc * d;", "V_smem = K_smem + Bc * (d + 2);"),
                    ("load_tile(K_smem, d, p.K", "load_tile(K_smem, d + 2, p.K"),
                    ("K_smem[(lane + 32 * c) * d + k]", "K_smem[(lane + 32 * c) * (d + 2) + k]"),
                    ("Br * d + 2 * Bc * d + Br * Bc", "Br * d + Bc * (d + 2) + Bc * d + Br * Bc"),
                    right_on_randn=True),
            mending("V_smem does not move: K's last rows are in it", r"^race.*smem",
                    ("load_tile(K_smem, d, p.K", "load_tile(K_smem, d + 1, p.K"),
                    ("K_smem[(lane + 32 * c) * d + k]", "K_smem[(lane + 32 * c) * (d + 1) + k]"),
                    ("Br * d + 2 * Bc * d + Br * Bc", "Br * d + Bc * (d + 1) + Bc * d + Br * Bc")),
            mending("no memory is asked for", r"^out of bounds.*smem",
                    ("V_smem = K_smem + Bc * d;", "V_smem = K_smem + Bc * (d + 1);"),
                    ("load_tile(K_smem, d, p.K", "load_tile(K_smem, d + 1, p.K"),
                    ("K_smem[(lane + 32 * c) * d + k]", "K_smem[(lane + 32 * c) * (d + 1) + k]")),
            mending("stored with a pitch, read without", r"^(wrong result|race|uninitialised)",
                    ("V_smem = K_smem + Bc * d;", "V_smem = K_smem + Bc * (d + 1);"),
                    ("load_tile(K_smem, d, p.K", "load_tile(K_smem, d + 1, p.K"),
                    ("Br * d + 2 * Bc * d + Br * Bc", "Br * d + Bc * (d + 1) + Bc * d + Br * Bc")),
        )),
    Exercise(
        number=24, name="no_saving", title="The mask saves nothing", lesson="04", direction="fwd",
        stage="flash2", common=("mask.cuh",),
        specification=f"""
A colleague writes: "flash2 with a causal mask is right. But it takes as long as without one, and asks as
many bytes of HBM. The header says: about half of K's and V's."
{LOOK}  q, k, v = torch.randn(3, 1, 2, 256, 64)
  for causal in (False, True):
      with flash.inspect() as report:
          flash.attention(q, k, v, causal=causal, stage=Path("mine/24_no_saving.cuh"))
      print(report.hbm)

It must stay right for every N_q and N_k: with more queries than keys the diagonal is negative, and the
first rows see no key. (Mask, from stages/common/mask.cuh, stands in the file.)
""",
        hints=(
            "Draw S with 4 x 4 tiles and the mask. Which tiles does block i compute, and which of them need"
            " not be?",
            "A tile j is of use if the tile's last row sees the tile's first key.",
            "The rows of tile i are i * Br to (i + 1) * Br - 1. Which of them sees the most keys? "
            "seen_by(row) says how many.",
            "All threads of the block must come to the same barriers: let the end of the loop over j be the"
            " same for all of them."),
        answer=paragraphs("""
end_j was the number of all tiles, whatever the mask. Tiles that no row of this block sees were loaded,
multiplied, and masked away: the result is right, as e^-inf is 0, and half of the work is in vain.

The last row of tile i, (i + 1) * Br - 1, sees the most keys. The tiles that hold these keys are the ones to
visit: ceil_div(seen_by(end_row - 1), BLOCK_C). That may be 0: then the loop does nothing, and O is 0, as it
must be for rows that see no key. It depends on the block only, so that all of its threads come to
the same barriers. A `continue` after the loading saves the multiplications, but not the traffic; a `break`
that depends on the warp leaves the others at a barrier.

Such a bug shows in the HBM traffic of a causal call beside that of a call without a mask."""),
        broken=changes(
            ("// The last row sees the most keys. From there on S_ij is skipped. The first row sees the "
             "fewest: before\n      // that one S_ij is whole.\n",
             "// From j = end_j on S_ij is skipped, and before j = cut_j it is whole.\n"),
            ("end_j = ceil_div(seen_by(end_row - 1), BLOCK_C);", "end_j = ceil_div(N_k, BLOCK_C);")),
        score=("hbm",), at_most={"hbm": 1.05}, own_calls=CAUSAL_SCORE,
        mutants=(
            unmended(r"^too much traffic", right_on_randn=True),
            mending("skipped after it is loaded", r"^too much traffic",
                    ("    float S_reg[rows][cols] = {};",
                     "    if (CAUSAL && j * Bc >= (i + 1) * Br + p.diagonal) continue;\n"
                     "    float S_reg[rows][cols] = {};"), right_on_randn=True),
            mending("the end is another one in each warp", r"^(barrier|deadlock|race)",
                    ("    __syncthreads();                      // all are done",
                     "    if (CAUSAL && j * Bc >= i * Br + (warp + 1) * rows + p.diagonal) break;\n"
                     "    __syncthreads();                      // all are done")),
            mending("the diagonal is left out", r"^wrong result",
                    ("end_j = ceil_div(N_k, BLOCK_C);",
                     "end_j = ceil_div(CAUSAL ? min(N_k, end_row) : N_k, BLOCK_C);"),
                    right_on_randn=True),
            mending("what the first row sees, not the last", r"^wrong result",
                    ("end_j = ceil_div(N_k, BLOCK_C);", "end_j = ceil_div(seen_by(row), BLOCK_C);"),
                    right_on_randn=True),
            mending("without a mask, too", r"^wrong result",
                    ("end_j = ceil_div(N_k, BLOCK_C);",
                     "end_j = ceil_div(max(min(N_k, end_row + N_k - N_q), 0), BLOCK_C);")),
        )),
    Exercise(
        number=25, name="sixteen_keys", title="Right up to 16 keys", lesson="06", direction="fwd",
        stage="conflict_free",
        specification=f"""
A colleague writes: "O and L are wrong in nearly every row, the same in every run. But if I multiply q by 0,
so that all scores are equal, both are right; with q times 0.01 they are nearly right. And with 16 keys or
fewer they are right, with 17 they are not. The checker finds nothing."

So print. In the kernel, where m_new is complete, for the lanes that have row 0:

  if (blockIdx.x == 0 && threadIdx.x < 32 && j == 0 && row_of(r) == 0)
    printf("lane %2d: %f\\n", threadIdx.x, m_new);
{LOOK}  q, k, v = torch.randn(3, 1, 1, 64, 64)
  flash.attention(q, k, v, stage=Path("mine/25_sixteen_keys.cuh"))
""",
        hints=(
            "All lanes that share a row must agree on something about that row. Do they?",
            "The picture of a warp as 4 x 8 lanes is in stages/common/conflict_free.cuh. Which lanes have "
            "row 0? Write their numbers in binary.",
            "__shfl_xor_sync(..., x, distance) gives a lane what lane ^ distance has. After the distances "
            "1, 2 and 4 a lane has combined the numbers of which 8 lanes?"),
        answer=paragraphs("""
The maximum was taken over the lanes that differ in the bits 0, 1 and 2 of their number. But a row's lanes
are 0, 1, 4, 5, 8, 9, 12, 13 for row 0: they differ in the bits 0, 2 and 3 (common/conflict_free.cuh). So
lanes 0, 1, 4, 5 had another maximum than 8, 9, 12, 13, with another row's numbers in it.

Which maximum is subtracted does not matter, as it cancels in O / l and in m + log(l); but all lanes of a
row must subtract the same one. So equal scores are right. And with up to 16 keys only the lanes without bit
3 have any, and these four agree.

Nothing is read or written that should not be, so the checker sees nothing. Numbers show it: print what the
lanes of one row have."""),
        broken=changes(
            ("// Over the 8 lanes that share a row, which differ in the bits 0, 2 and 3 (lane_col8)\n",
             "// Over the 8 lanes that share a row\n"),
            ("for (int distance : {1, 4, 8}) x = fmaxf(", "for (int distance : {1, 2, 4}) x = fmaxf(")),
        mutants=(
            unmended(r"^wrong result.*L\["),
            mending("the maximum over 16 lanes, of two rows", r"^wrong result.*no other row's",
                    ("for (int distance : {1, 2, 4}) x = fmaxf(", "for (int distance : {1, 2, 4, 8}) x = "
                                                                  "fmaxf("),
                    right_on_randn=True),
            mending("the maximum over the warp, of four rows", r"^wrong result.*no other row's",
                    ("for (int distance : {1, 2, 4}) x = fmaxf(",
                     "for (int distance : {1, 2, 4, 8, 16}) x = fmaxf("), right_on_randn=True),
            mending("the sum over the same lanes as the maximum", r"^wrong result",
                    ("for (int distance : {1, 4, 8}) x += ", "for (int distance : {1, 2, 4}) x += ")),
            mending("the bits of the lanes 0 to 7, moved by one", r"^wrong result",
                    ("for (int distance : {1, 2, 4}) x = fmaxf(",
                     "for (int distance : {2, 4, 8}) x = fmaxf(")),
            mending("two of the three bits", r"^wrong result",
                    ("for (int distance : {1, 2, 4}) x = fmaxf(", "for (int distance : {1, 4}) x = fmaxf(")),
        )),
    Exercise(
        number=26, name="last_tile", title="NaN from the last tile", lesson="09", direction="fwd",
        stage="cp_async", probes=(UNDER_WAY,),
        specification=f"""
A colleague writes: "S needs K_j only, so why wait for V_j, too? I made K and V groups of their own: at the
head a tile waits for K_j, and before P V for V_j, while K_j+1 and V_j+1 are under way. Each wait has a
barrier after it. With FLASH_SIM_COPIES=early all is right. Without it O is NaN, in every call; L is right.
I printed O_reg after each tile: all tiles are right but the last one."

FLASH_SIM_COPIES says when an asynchronous copy is made: as late as it may be (the default), or where it
starts (early).
{LOOK}  q, k, v = torch.randn(3, 1, 2, 256, 64, dtype=torch.bfloat16)
  with flash.inspect() as report:
      flash.attention(q, k, v, stage=Path("mine/26_last_tile.cuh"))
  print(report)

The copies of a tile must still run while the products of the one before do: the check looks.
""",
        hints=(
            "cp_async_wait<n>() waits until at most the last n groups are under way. Which ones does it not "
            "wait "
            "for?",
            "Write down, for three tiles, which groups this thread has committed when it comes to the "
            "second wait: "
            "in the first tile, in the second, and in the last.",
            "In the last tile no copies follow, so no groups do. Must a group have copies in it?"),
        answer=paragraphs("""
cp_async_wait<2>() before P V counts on two younger groups, K_j+1 and V_j+1. In the last tile there are
none: the last group is V_j itself, and "all but the last two" waits for nothing.

A wait counts groups, not arrays. So the number of groups behind must be the same in every turn: commit in
each turn, whether anything was copied or not. An empty group is complete at once, and keeps the count. (Or
the last tile waits by <0>.) Waiting by <0> in every tile is right, too, but then nothing overlaps: it waits
for the next tile's copies, which have just been started.

The ends of a pipeline, its first and its last turns, are where such bugs are. A run with early copies shows
nothing. The simulator makes them as late as it may, and the checker reports each read of a place to which a
copy is under way."""),
        broken=changes(
            ("  copy_tile<threads>(V_smem, tile_index, V, p.V.stride_n, tiles[0] * Bc, Bc, p.N_k);\n",
             "  cp_async_commit();                        // Q and K_0\n"
             "  copy_tile<threads>(V_smem, tile_index, V, p.V.stride_n, tiles[0] * Bc, Bc, p.N_k);\n"),
            ("    cp_async_wait<0>();\n    __syncthreads();                        "
             "// K_j and V_j are there; and all are done with the last ones\n",
             "    cp_async_wait<1>();                     // for K_j; V_j may be under way\n"
             "    __syncthreads();                        // and all are done with the last K_j and V_j\n"),
            ("      copy_tile<threads>(V_smem + next_buffer, tile_index, V, p.V.stride_n, next, Bc, "
             "p.N_k);\n",
             "      cp_async_commit();\n"
             "      copy_tile<threads>(V_smem + next_buffer, tile_index, V, p.V.stride_n, next, Bc, "
             "p.N_k);\n"),
            ("    #pragma unroll\n    for (int k = 0; k < Bc / 16; k++) { ",
             "    cp_async_wait<2>();                     // for V_j; K_j+1 and V_j+1 may be under way\n"
             "    __syncthreads();\n"
             "    #pragma unroll\n    for (int k = 0; k < Bc / 16; k++) { ")),
        mutants=(
            unmended(r"^race.*V_smem.*(cp_async|copy)"),
            mending("one group less: the last tile has none behind it", r"^race.*V_smem.*(cp_async|copy)",
                    ("cp_async_wait<2>(); ", "cp_async_wait<1>(); ")),
            mending("a wait for all: nothing overlaps", r"^no overlap.*not under way",
                    ("cp_async_wait<2>(); ", "cp_async_wait<0>(); "), right_on_randn=True),
            mending("a wait at once", r"^no overlap.*not under way",
                    ("V, p.V.stride_n, next, Bc, p.N_k);\n      cp_async_commit();\n    }",
                     "V, p.V.stride_n, next, Bc, p.N_k);\n      cp_async_commit();\n"
                     "      cp_async_wait<0>();\n    }"),
                    ("cp_async_wait<2>(); ", "cp_async_wait<0>(); "), right_on_randn=True),
            mending("one empty group, where two are counted", r"^race.*V_smem.*(cp_async|copy)",
                    ("V, p.V.stride_n, next, Bc, p.N_k);\n      cp_async_commit();\n    }",
                     "V, p.V.stride_n, next, Bc, p.N_k);\n    }\n    cp_async_commit();")),
            mending("the barrier first: the copies of others may be under way",
                    r"^race.*V_smem.*(cp_async|copy)",
                    ("    cp_async_wait<2>();                     // for V_j; K_j+1 and V_j+1 may be under "
                     "way\n"
                     "    __syncthreads();\n",
                     "    __syncthreads();\n    if (t + 1 < tiles.end) cp_async_wait<2>();\n"
                     "    else cp_async_wait<0>();\n")),
            mending("a fence is no wait", r"^race.*V_smem.*(cp_async|copy)",
                    ("cp_async_wait<2>(); ", "__threadfence_block(); ")),
        )),


  ]
