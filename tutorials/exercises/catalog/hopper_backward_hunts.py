"""The bug hunts over Hopper's backward: lesson 14."""

from ..exercise import Exercise
from .hopper_backward import BACKWARD, TILES
from .hunts import LOOK, changes, mending, paragraphs, unmended

# ------------------------------------------------------------------------------------ 47
ONE_DS = (("dST_smem + n % 2 * Bc * Br, dS_frag", "dST_smem, dS_frag"),
          ("dS_buffer = n % 2 * (Bc * Br / 8)", "dS_buffer = 0"))
STORE = "      if (part == 0) store_fragments(dST_smem, dS_frag, Bc, first_key);\n"
MEET = "      named_barrier_sync(1, 32 * warps);"
UNDER_DQ = r"^race.*dST_smem\[\d+\].*multiplies it.*writes it"

# ------------------------------------------------------------------------------------ 48
V_FILL = "      V_smem.fill(V_map, m, work.tile * Bc, work.h, work.b);\n"
PRODUCER = V_FILL + "      if (m == 0) wait_for_previous_kernel();\n"
FIRST = "        for (int t = tiles.first; t < tiles.end; t++, n++) {             // line 9\n"
Q_FILL = "          fill(Q_smem, Q_map, n, i * Br, h, work.b, L_smem, w.L + row);\n"
D_FILL = "          fill(dO_smem, dO_map, n, i * Br, h, work.b, D_smem, w.D + row);\n"
LAUNCHED = r"^too early.*wait_for_previous_kernel\(\) must come first"

EXERCISES = [
    Exercise(
        number=47, name="one_ds", title="One buffer must do", lesson="14", direction="bwd",
        stage="warp_specialized", tiles=TILES, own_calls=BACKWARD,
        specification=f"""
A colleague writes: "Shared memory is short, and dS has two buffers. There is a barrier of all consumers
between the stores of dS and the product that reads it. So I took one of the buffers away. With 64 keys a
block, that is with one warpgroup, I have never seen a wrong number, and the checker finds nothing. With 128
keys dQ is wrong on some days, and dK and dV never are."
{LOOK}  q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 192, 64, dtype=torch.float16).unbind())
  with flash.inspect() as report:
      o = flash.attention(q, k, v, backward=Path("mine/47_one_ds.cuh"), Br_bwd=64, Bc_bwd=128)
      o.sum().backward()
  print(report)
""",
        hints=(
            "Which product reads dS from shared memory, and which one takes it from registers? Whose dS does "
            "a warpgroup read?",
            "Write down what two warpgroups do from one barrier to the next. What may the fast one do while "
            "the slow one is at its first line after the barrier?",
            "The barrier orders stores of a tile before its product. What orders that product before the "
            "next tile's stores?"),
        answer=paragraphs("""
A barrier has two sides. The one in the loop says that all of dS is there before dQ is multiplied. Nothing
says that all have multiplied when a warpgroup stores dS of the next tile: it waits for its own dQ, and not
for the other's, which reads all of dS as well. One warpgroup is alone, and its own wait is enough.

With two buffers the same barrier does both: who passes it at tile n + 1 has been through its dQ of tile n, so
the stores of n + 2, to that buffer, come after it. With one there would have to be a second barrier a tile,
behind the wait for dQ or ahead of the stores."""),
        broken=changes(*ONE_DS),
        mutants=(
            unmended(UNDER_DQ, right_on_randn=True),
            mending("the warp's lanes wait for each other", UNDER_DQ,
                    (STORE, "      __syncwarp();\n" + STORE), right_on_randn=True),
            mending("a fence is no barrier", UNDER_DQ, (STORE, "      fence_proxy_async();\n" + STORE),
                    right_on_randn=True),
            mending("the warpgroup's own products are waited for once more", UNDER_DQ,
                    (STORE, "      wgmma_wait<0>();\n" + STORE), right_on_randn=True),
            mending("a second barrier at the same place", UNDER_DQ,
                    (MEET, "      named_barrier_sync(1, 32 * warps);\n" + MEET), right_on_randn=True),
            mending("a barrier of each warpgroup alone", UNDER_DQ,
                    (STORE, "      named_barrier_sync(2 + warp / 4, 128);\n" + STORE), right_on_randn=True),
        )),
    Exercise(
        number=48, name="too_early", title="The first call is wrong", lesson="14", direction="bwd",
        stage="hopper_tuned", tiles=TILES, own_calls=BACKWARD,
        specification=f"""
A colleague writes: "A kernel may start before the one ahead has ended, and the ones here do. The consumers
wait for the kernel ahead, before they touch what it has made. The producer only asks for copies, so it need
not wait. Calls in a loop, on the same tensors, are all right. On new tensors a few rows of the gradients are
sometimes wrong, in the first call."
{LOOK}  q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 192, 64, dtype=torch.float16).unbind())
  with flash.inspect() as report:
      o = flash.attention(q, k, v, backward=Path("mine/48_too_early.cuh"), Br_bwd=64, Bc_bwd=128)
      o.sum().backward()
  print(report)
""",
        hints=(
            "The finding names a line that reads too early. Which array is it, and which of the launches at "
            "the end of the file writes it?",
            "Whose copies does the wait of a consumer order? The copy has been asked for by another thread, "
            "before.",
            "K, V, Q and dO are the caller's, and were there before any of these kernels. L and D are not: "
            "who has made them in this layout?"),
        answer=paragraphs("""
wait_for_previous_kernel() was missing in the producer. Its copies of L and D read what prepare_kernel writes,
and it asked for them as soon as its block had started. That the consumers wait is of no use: the copy may
have read HBM long before. In a loop on the same tensors the workspace has the numbers of the call before,
which are the same ones, so nothing is wrong.

The thread that asks must have waited. K and V may be asked for before that, as they are the caller's, and
that is what an early launch is for. The wait belongs between them and the first row of L."""),
        broken=changes((PRODUCER, V_FILL)),
        mutants=(
            unmended(LAUNCHED, right_on_randn=True),
            mending("after the first rows of L", LAUNCHED,
                    (Q_FILL, Q_FILL + "          if (t == tiles.first) wait_for_previous_kernel();\n"),
                    right_on_randn=True),
            mending("after the loop", LAUNCHED,
                    (D_FILL + "        }\n", D_FILL + "        }\n        wait_for_previous_kernel();\n"),
                    right_on_randn=True),
            mending("from the second tile on", LAUNCHED,
                    (Q_FILL, "          if (n > 0) wait_for_previous_kernel();\n" + Q_FILL),
                    right_on_randn=True),
            mending("a fence", LAUNCHED, (FIRST, "        __threadfence();\n" + FIRST), right_on_randn=True),
            mending("the lanes that have no work wait", LAUNCHED,
                    ("    if (threadIdx.x > 32 * warps) return;\n",
                     "    if (threadIdx.x > 32 * warps) return wait_for_previous_kernel();\n"),
                    right_on_randn=True),
        )),
]
