"""The bug hunts over warpgroups, rings and the copy engine's other way: lesson 13."""

from dataclasses import replace

from ..cases import FEW, Case
from ..exercise import Exercise
from .hunts import LOOK, changes, mending, paragraphs, unmended
from .warpgroups import HANGS, SMALL, TICKETS, UNDER_COPY, UNDER_WGMMA

# ------------------------------------------------------------------------------------ 41
SOFTMAX = "    softmax(t);\n"
GIVE_BACK = "    V_smem.release(t - 1);\n"
NEXT_K = "    if (t + 1 < end) K_smem.wait_until_full(t + 1);\n"
WAIT = "    wgmma_wait<0>();\n    rescale"

# ------------------------------------------------------------------------------------ 42
# Rows that see no key in a whole tile of Q
UNSEEN = Case(1, 2, 1, 140, 50, 40, True, None, 15)
FROM_0 = changes(
    ("Q_i is given back after its last\n// product, and up to d = 128 there is room for two. Rings go on: "
     "`step` counts the tiles of K and V that a\n// block has had before this tile of Q.\n",
     "Q_i is given back after its last\n// product, and up to d = 128 there is room for two.\n"),
    ("around both roles, with step + t for t in the rings.", "around both roles."),
    ("for (int n = 0, step = 0, next = blockIdx.x;; n++) {   ", "for (int n = 0, next = blockIdx.x;; n++) {"),
    ("K_smem.fill(K_map, step + t, tiles", "K_smem.fill(K_map, t, tiles"),
    ("V_smem.fill(V_map, step + t - 1, tiles", "V_smem.fill(V_map, t - 1, tiles"),
    ("      step += end;\n    }\n  }\n", "    }\n  }\n"),
    ("for (unsigned n = 0, step = 0;; n++) { ", "for (unsigned n = 0;; n++) { "),
    ("    K_smem.wait_until_full(step);\n", "    K_smem.wait_until_full(0);\n"),
    ("    multiply_S(step, n);\n", "    multiply_S(0, n);\n"),
    ("    K_smem.release(step);\n", "    K_smem.release(0);\n"),
    ("K_smem.wait_until_full(step + 1);", "K_smem.wait_until_full(1);"),
    ("      multiply_S(step + t, n);\n      multiply_O(step + t - 1);\n",
     "      multiply_S(t, n);\n      multiply_O(t - 1);\n"),
    ("      K_smem.release(step + t);\n", "      K_smem.release(t);\n"),
    ("K_smem.wait_until_full(step + t + 1);", "K_smem.wait_until_full(t + 1);"),
    ("      V_smem.release(step + t - 1);\n", "      V_smem.release(t - 1);\n"),
    ("    multiply_O(step + end - 1);\n", "    multiply_O(end - 1);\n"),
    ("    V_smem.release(step + end - 1);\n", "    V_smem.release(end - 1);\n"),
    ("    Q_smem.release(n);\n    step += end;\n", "    Q_smem.release(n);\n"))
OF_PRODUCER = [(change.new, change.old) for change in FROM_0[2:6]]
OF_CONSUMERS = [(change.new, change.old) for change in FROM_0[6:]]


def in_both(old: str, new: str) -> list[tuple[str, str]]:
    """`step` in both loops, with another text in place of one that is in the right mending."""
    return [(broken, mended.replace(old, new)) for broken, mended in OF_PRODUCER + OF_CONSUMERS]


# ------------------------------------------------------------------------------------ 43
FENCE = "  fence_proxy_async();\n"
BEFORE_STORE = "  __syncwarp();\n  if (lane > 0) return;\n"
NOT_SEEN = r"^proxy fence.*an engine, which may not see that yet"

EXERCISES = [
    Exercise(
        number=41, name="early_v", title="Right on most days", lesson="13", direction="fwd", stage="overlap",
        tiles=SMALL, own_calls=FEW,
        specification=f"""
A colleague writes: "ncu said that the producer waits for V's buffers. By the time that a softmax is done, P V
of the tile before must be done, too: it was issued before the softmax began. So I give V back there, a few
lines sooner, and the kernel is a little faster. In a thousand calls O is right. In one of them a few rows are
wrong by more than rounding; I think that my card has a fault."
{LOOK}  q, k, v = torch.randn(3, 1, 2, 139, 64, dtype=torch.float16)
  with flash.inspect() as report:
      flash.attention(q, k, v, stage=Path("mine/41_early_v.cuh"), Br=64, Bc=32)
  print(report)
""",
        hints=(
            "The simulator says which product reads a buffer, which copy writes to it, and that nothing "
            "orders "
            "the two. Whose buffer is it, and what lets the producer fill it?",
            "wgmma_wait<1>() waits for one of the two products. Which one? What says that the other one is "
            "done?",
            "An arrival at `empty` is a promise: this warp needs the buffer no more. A product reads its "
            "buffer until somebody has waited for it."),
        answer=paragraphs("""
V of tile t - 1 was given back after the softmax, and P V, which reads it, was waited for only after that.
P V is asynchronous: that it was issued long before says nothing about when it ends. Mostly it is done, as the
softmax takes longer. If another warpgroup keeps the tensor cores busy, it is not. Then the producer, which
has been told that the buffer is empty, has the next V copied over the one that is being multiplied.

So V_smem.release(t - 1) belongs behind wgmma_wait<0>(). K could be given back sooner, as wgmma_wait<1>() has
waited for S, the first of the two groups. Nothing but a wait for the product makes the promise true: no
__syncwarp(), no fence, and no time."""),
        broken=changes((SOFTMAX + NEXT_K + "    wgmma_wait<0>();\n" + GIVE_BACK + "    rescale",
                        SOFTMAX + GIVE_BACK + NEXT_K + WAIT)),
        mutants=(
            unmended(UNDER_WGMMA, right_on_randn=True),
            mending("a wait that leaves P V under way", UNDER_WGMMA,
                    (GIVE_BACK, "    wgmma_wait<1>();\n" + GIVE_BACK), right_on_randn=True),
            mending("after the wait for the next K", UNDER_WGMMA,
                    (GIVE_BACK + NEXT_K, NEXT_K + GIVE_BACK), right_on_randn=True),
            mending("the lanes of the warp wait for each other", UNDER_WGMMA,
                    (GIVE_BACK, "    __syncwarp();\n" + GIVE_BACK), right_on_randn=True),
            mending("a fence is no wait", UNDER_WGMMA,
                    (GIVE_BACK, "    fence_proxy_async();\n" + GIVE_BACK), right_on_randn=True),
            mending("V is not given back: nobody overwrites it", HANGS, (GIVE_BACK, "")),
            mending("the buffer of this tile", UNDER_WGMMA,
                    (GIVE_BACK, GIVE_BACK.replace("t - 1", "t")), right_on_randn=True),
        )),
    Exercise(
        number=42, name="fourth_head", title="Four heads are too many", lesson="13", direction="fwd",
        stage="persistent", tiles=SMALL, own_calls=replace(TICKETS, cases=(*TICKETS.cases, UNSEEN)),
        specification=f"""
A colleague writes: "I made pingpong persistent: a loop over tiles of Q around the producer and around the
consumers, and the number of the next tile comes with Q. In all of my tests O and L are right: small ones of
all lengths, large ones of 1024 keys. In the model it goes wrong. I cut that down, for the simulator: three
heads of
64 queries are right with any number of keys. Four are right with 128 keys, and an error with 139."

(The simulator has three multiprocessors.)
{LOOK}  q, k, v = torch.randn(1, 4, 64, 64).half(), *torch.randn(2, 1, 4, 139, 64).half()
  flash.attention(q, k, v, stage=Path("mine/42_fourth_head.cuh"), Br=64, Bc=32)
""",
        hints=(
            "How many blocks are there, and how many tiles of Q? What is different for a tile that is not "
            "its "
            "block's first?",
            "The simulator says that the producer arrives at a phase of `full` that has had its arrival: a "
            "wait "
            "before it did not wait. With 139 keys and Bc = 32, how often has each buffer of K been filled "
            "after "
            "the first tile of Q? With 128?",
            "In a ring the step says which buffer it is, and in which phase its mbarriers are. Those count "
            "on, "
            "whatever tile of Q they work for."),
        answer=paragraphs("""
The rings of K and V go on from one tile of Q to the next: their mbarriers are where the last tile has left
them. But the step began with 0 again for each tile. Step s means buffer s % 2 in phase s / 2, of which a wait
names the parity, s / 2 % 2. After a tile of Q with `end` steps, that fits only if `end` is a multiple of 4:
then buffer and parity are as at the start. 128 keys are 4 tiles of 32, 1024 are 32: right. 139 keys are 5.

And only a block that has a second tile of Q can go wrong: with no more tiles than multiprocessors nobody has.

Both loops must count: step += end after each tile of Q, and step + t for t, in the producer and in the
consumers alike. `end` is one at least: for a tile of Q that sees no key there is one step, too."""),
        broken=FROM_0,
        mutants=(
            unmended(UNDER_WGMMA, right_on_randn=True),
            mending("rounded up to whole rounds of two phases", UNDER_WGMMA,
                    *in_both("step += end", "step += (end + 3) / 4 * 4"), right_on_randn=True),
            mending("tiles that see no key have no step", r"^error.*all have been made in this phase",
                    *[(old, new.replace("step += end", "step += tiles.end")) for old, new in OF_PRODUCER],
                    *OF_CONSUMERS, right_on_randn=True),
            mending("the producer counts, and the consumers do not", UNDER_COPY,
                    *OF_PRODUCER, right_on_randn=True),
            mending("the consumers count, and the producer does not", UNDER_WGMMA,
                    *OF_CONSUMERS, right_on_randn=True),
            mending("a tile of Q is a step", r"^error.*all have been made in this phase",
                    *in_both("step += end", "step++")),
            mending("all tiles have as many steps as the first", UNDER_WGMMA,
                    *in_both("step += end", "step = (n + 1) * 4"), right_on_randn=True),
        )),
    Exercise(
        number=43, name="stale_o", title="O of yesterday", lesson="13", direction="fwd", stage="hopper_tuned",
        common=("store_panels.cuh",), tiles=SMALL, own_calls=FEW,
        specification=f"""
A colleague writes: "O goes to shared memory by stmatrix, and from there by one TMA store a warp. Only lanes
of one warp share these rows, so a __syncwarp() orders what they have written and what lane 0 asks for. O is
right
in the simulator. On my GPU a few chunks of 16 bytes are sometimes those of the tile of Q before."
{LOOK}  q, k, v = torch.randn(3, 1, 8, 128, 64).half()
  with flash.inspect() as report:
      flash.attention(q, k, v, stage=Path("mine/43_stale_o.cuh"), Br=64, Bc=32)
  print(report)
""",
        hints=(
            "The simulator says who wrote the chunk, and who takes it. Both are of one warp, and the "
            "__syncwarp() is between them. What is the second one, if it is no thread?",
            "The engine reaches shared memory on another path than loads and stores of threads: the async "
            "proxy. stages/common/hopper.cuh has an instruction for what must be seen there.",
            "Such a fence is about what its own thread has written. All 32 lanes have written. So who must "
            "issue it, and on which side of the __syncwarp()?"),
        answer=paragraphs("""
fence_proxy_async() was missing. A thread's stores to shared memory, and reads by the copy engine, go two ways
(PTX calls them the generic and the async proxy). A barrier orders threads. It does not say that what they
have written has arrived where the engine reads it.

All lanes write, so each lane fences its own writes, and then a barrier says that all have: stmatrix,
fence_proxy_async(), __syncwarp(), and lane 0 asks for the copy. No wait after the copy repairs that, and no
fence of another kind: __threadfence_block() is about threads."""),
        broken=changes(("tile_rows)), fragment);\n  }\n" + FENCE,
                        "tile_rows)), fragment);\n  }\n")),
        mutants=(
            unmended(NOT_SEEN, right_on_randn=True),
            mending("a fence of another kind", NOT_SEEN,
                    (BEFORE_STORE, "  __threadfence_block();\n" + BEFORE_STORE), right_on_randn=True),
            mending("the fence for new mbarriers", NOT_SEEN,
                    (BEFORE_STORE, "  fence_mbarrier_init();\n" + BEFORE_STORE), right_on_randn=True),
            mending("before the writes", NOT_SEEN,
                    ("  const int lane = threadIdx.x % 32;\n  if (lane == 0) bulk_wait_read<0>();",
                     "  const int lane = threadIdx.x % 32;\n  fence_proxy_async();\n"
                     "  if (lane == 0) bulk_wait_read<0>();"), right_on_randn=True),
            mending("lane 0 waits until its copy is done", NOT_SEEN,
                    ("  bulk_commit();\n", "  bulk_commit();\n  bulk_wait<0>();\n"), right_on_randn=True),
            mending("the fence is there, and no barrier follows it", NOT_SEEN + "|^race.*stores from it",
                    (BEFORE_STORE, FENCE + "  if (lane > 0) return;\n"), right_on_randn=True),
        )),
]
