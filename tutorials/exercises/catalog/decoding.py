"""The exercise and the bug hunt over decoding: lesson 11."""

from ..exercise import COMMON, Exercise, Mutant, sections
from . import forward
from .hunts import LOOK, changes, mending, paragraphs, unmended

TILES = {"Br": 32, "Bc": 16}        # several ranges in all calls but that with one key
MERGE = "merge_ranges.cuh"
ONLINE = sections((COMMON / MERGE).read_text())["the ranges, merged"]
PLAIN = """\
  for (int s = 0; s < p.splits; s++) m = fmaxf(m, *part(p, s, row));
  if (m == -INFINITY) m = 0.f;              // no range has a key that counts: -inf - -inf is NaN
  for (int first = col < d_v ? share : p.splits; first < p.splits; first += 4 * shares) {
    for (int n = 0; n < 4; n++) {
      const int s = first + n * shares;
      const float* L_s = part(p, min(s, p.splits - 1), row);
      const Four O_s = *reinterpret_cast<const Four*>(L_s + 4 + col);
      const float factor = fast_exp2(LOG2_E * (*L_s - m)) * (s < p.splits);
      l += factor;
      for (int c = 0; c < 4; c++) O[c] += factor * O_s.x[c];
    }
  }
  l = warp_sum(l, shares);
  for (int c = 0; c < 4; c++) {
    O[c] = warp_sum(O[c], shares);
    if (share == 0 && col < d_v)
      p.O.head(bh / p.H, bh % p.H)[query * p.O.stride_n + col + c] = ELEMENT(l == 0.f ? 0.f : O[c] / l);
  }
  if (threadIdx.x == 0) p.L[row] = m + logf(l);
"""
FACTOR = "const float factor = fast_exp2(LOG2_E * (*L_s - m)) * (s < p.splits);"
LOAD_O = "const Four O_s = *reinterpret_cast<const Four*>(L_s + 4 + col);"
ADD_O = "O[c] += factor * O_s.x[c];"
STORE_O = "ELEMENT(l == 0.f ? 0.f : O[c] / l);"
STORE_L = "p.L[row] = m + logf(l);"
NO_KEY = "  if (m == -INFINITY) m = 0.f;              // no range has a key that counts: -inf - -inf is NaN\n"


def wrong(what: str, reason: str, *changes: tuple[str, str], right_on_randn: bool = False) -> Mutant:
    """As forward.wrong(), of an answer that knows the greatest L_s before it weighs the ranges."""
    return forward.wrong(what, reason, (ONLINE, PLAIN), *changes, right_on_randn=right_on_randn)


# Rows packed head by head
BY_HEAD = changes(
    ("packed into one tile: of a key head, row r is query r / G of head\n//     r % G.",
     "packed into a tile: of a key head, row r is query r % N_q of head\n//     r / N_q."),
    ("row r is query r / G of head r % G: G neighbours are its heads, of one query.",
     "row r is query r % N_q of head r / N_q: N_q neighbours are its queries, of a head."),
    ("return h_kv * G + row % G;", "return h_kv * G + row / (rows / G);"),
    ("x.head(b, head_of(row)) + row / G * x.stride_n;",
     "x.head(b, head_of(row)) + row % (rows / G) * x.stride_n;"),
    ("((int64_t)b * p.H + head_of(row)) * p.N_q + row / G;",
     "((int64_t)b * p.H + head_of(row)) * p.N_q + row % p.N_q;"))
OF_L = (BY_HEAD[-1].new, "((int64_t)b * p.H + h_kv * G + row % G) * p.N_q + row / G;")
OF_Q_AND_O = (BY_HEAD[-2].new, "x.head(b, h_kv * G + row % G) + row / G * x.stride_n;")
ASKED = "warp_row + 16 * s, j * Bc, cut, G);"
LOOPED = "mask.key_tiles(i / G);"
ANOTHER = r"^wrong result.*the mask is asked about another query than a row's"

EXERCISES = [
    Exercise(
        number=31, name="merge_ranges", title="Ranges become a row", lesson="11", direction="fwd",
        stage="split_kv", sections=("the ranges, merged",), common=(MERGE,), tiles=TILES,
        specification="""
Keys are split into p.splits ranges. For each row of O, each range s has left what its own keys give: L_s,
the logarithm of its sum of e^S, and O_s, which is normalised: as if there were no other keys. Merge them, and
store the row's O and L.

Given: part(p, s, row) points to L_s, and part(p, s, row) + 4 to the d_v numbers of O_s, all floats. This
thread's columns are col to col + 3, and there are none if col >= d_v. `shares` neighbouring threads have the
same columns, and divide the ranges: this one has the ranges share, share + shares, share + 2 * shares and so
on. warp_sum(x, shares) is the sum over these neighbours, warp_max(x, shares) the greatest; all threads must
call them. m is -INFINITY, l and O[0] to O[3] are 0. Write the elements (query, col) to (query, col + 3) of
head bh % p.H of batch element bh / p.H of O, by ELEMENT(...), and p.L[row], which one thread of the block
writes.

A range may have no key that the row sees: its L_s is -INFINITY, its O_s is 0, and it counts for nothing. If
that is so in all ranges, O = 0 and L = -INFINITY. L_s may be any number: e^L_s may be infinite, or 0.

fast_exp2(x) is 2^x, LOG2_E is log2(e), logf the natural logarithm, and logf(0.f) is -INFINITY.
""",
        hints=(
            "L_s is the logarithm of the sum of e^S over the range's keys. What is the sum over all keys? "
            "And which share of it is range s?",
            "O is a mean of all O_s, weighted by these shares. Both sums can be relative to e^m, as in the "
            "online softmax: then the weights are e^(L_s - m), and none is above 1.",
            "m is the greatest L_s, which a loop of its own may find first. Or m is the greatest so far, and "
            "what there is of l and O is rescaled when it grows: as the online softmax does.",
            "l is the sum of the weights, O the sum of weight times O_s; at last O / l and m + log(l). What "
            "is L_s - m where both are -INFINITY?"),
        mutants=(
            wrong("the greatest is not subtracted", r"^wrong result.*weights are e\^L_s.*overflows above 88",
                  (FACTOR, "const float factor = s < p.splits ? fast_exp2(LOG2_E * *L_s) : 0.f;"),
                  (STORE_L, "p.L[row] = logf(l);"), right_on_randn=True),
            wrong("-inf - -inf", r"^wrong result.*-inf is subtracted from -inf, which is NaN", (NO_KEY, ""),
                  right_on_randn=True),
            wrong("a range without a key has the weight 1", r"^wrong result.*a range without a key counts",
                  (FACTOR, "const float factor = s >= p.splits ? 0.f : *L_s == -INFINITY ? 1.f\n"
                           "          : fast_exp2(LOG2_E * (*L_s - m));"), right_on_randn=True),
            wrong("a range without a key has L_s = 0", r"^wrong result.*a range without a key counts",
                  (FACTOR, "const float factor = s >= p.splits ? 0.f\n"
                           "          : fast_exp2(LOG2_E * ((*L_s == -INFINITY ? 0.f : *L_s) - m));"),
                  right_on_randn=True),
            wrong("O / 0", r"^wrong result.*O is divided by l = 0, which gives NaN",
                  (STORE_O, "ELEMENT(O[c] / l);"), right_on_randn=True),
            wrong("a plain mean", r"^wrong result.*the ranges count the same",
                  (FACTOR, "const float factor = s < p.splits;")),
            wrong("O is a plain mean, and L is right", r"^wrong result.*the ranges count the same",
                  (ADD_O, "O[c] += (s < p.splits) * O_s.x[c];"), (STORE_O, "ELEMENT(O[c] / p.splits);")),
            wrong("O is not divided", r"^wrong result.*O is not divided by the sum of the weights",
                  (STORE_O, "ELEMENT(O[c]);")),
            wrong("L without m", r"^wrong result.*L lacks m", (STORE_L, "p.L[row] = logf(l);")),
            wrong("L is m", r"^wrong result.*L is the greatest L_s", (STORE_L, "p.L[row] = m;")),
            wrong("log2 in L", r"^wrong result.*logarithm to base 2", (STORE_L, "p.L[row] = m + log2f(l);")),
            wrong("2^(L_s - m)", r"^wrong result.*2\^\(L_s - m\)", ("LOG2_E * (*L_s - m)", "*L_s - m")),
            wrong("upside down", r"^wrong result.*upside down", ("(*L_s - m)", "(m - *L_s)")),
            wrong("without the last range", r"^wrong result.*last range is left out",
                  (FACTOR, FACTOR.replace("p.splits", "p.splits - 1"))),
            wrong("the last range again", r"^wrong result.*last range counts several times",
                  (FACTOR, FACTOR.replace(" * (s < p.splits)", ""))),
            wrong("the neighbours' ranges are left out", r"^wrong result.*neighbours have the others",
                  ("l = warp_sum(l, shares);", ""), ("O[c] = warp_sum(O[c], shares);", "")),
            wrong("O_s right behind L_s", r"^uninitialised.*merge_kernel.*\bparts\b",
                  (LOAD_O, "Four O_s;\n      for (int c = 0; c < 4; c++) O_s.x[c] = L_s[1 + col + c];")),
            wrong("every thread stores L", r"^race.*merge_kernel.*\bL\b",
                  ("if (threadIdx.x == 0) p.L", "p.L"), right_on_randn=True),
        )),
    Exercise(
        number=32, name="several_queries", title="Right with one query", lesson="11", direction="fwd",
        stage="split_kv", tiles=TILES, common=("packed_rows.cuh",),
        specification=f"""
A colleague writes: "I decode with this file, and all is well. Now a small model guesses four tokens ahead,
and the large one looks at all four in one call: N_q = 4, causal. With 8 query heads to 2 key heads, O and L
are wrong in most rows. The same call is right without the causal mask. It is right with as many key heads as
query heads. And it is right with one query, causal or not."
{LOOK}  q, k, v = torch.randn(1, 8, 4, 64), *torch.randn(2, 1, 2, 20, 64)
  q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
  stage = Path("mine/32_several_queries.cuh")
  for name in (stage, "ampere_tuned"):
      _, L = flash.attention(q, k, v, causal=True, stage=name, return_lse=True)
      print(L[0, :4])                                         # of four heads that share a key head
""",
        hints=(
            "What has the causal mask to do with how many heads share a key head? Nothing, in the formula. "
            "But what is the mask asked, and what does it need to know of a row?",
            "A tile's rows are queries of several heads. Write down for G = 4 and N_q = 4 which query each "
            "of the 16 rows is: by PackedRows, and by what mask_tile is told.",
            "mask_tile's last argument says how many rows, one after the other, are of one query. Is that "
            "so? And which queries does key_tiles(i / G) take tile i for?"),
        answer=paragraphs("""
Rows were packed head by head: row r was query r % N_q of head r / N_q. But the mask was asked as if they
were packed query by query: about query r / G. Q, O and L agreed with each other, and without a mask any order
will do. With G = 1 or N_q = 1 the two orders are the same one.

How rows are packed is agreed upon in all places that make a query of a row: where Q is loaded, where O and L
are stored, in mask_tile, in the sink's head, and in the range of tiles that a tile of rows needs. Back to
row / G and row % G, and they agree again.

One could mend the mask's side instead, and take row % N_q there. Then a tile of rows may have the first
query of one head and the last one of another, and key_tiles() must be asked for all of them. Query by query,
a tile's rows are neighbours in time: under a causal mask a tile stops early."""),
        broken=BY_HEAD,
        mutants=(
            unmended(ANOTHER + ".*r % N_q, and the mask takes it for query r / G", right_on_randn=True),
            mending("the mask is asked about row r", ANOTHER, (ASKED, "warp_row + 16 * s, j * Bc, cut);"),
                    right_on_randn=True),
            mending("the mask is asked about a row's head", ANOTHER,
                    (ASKED, "warp_row + 16 * s, j * Bc, cut, p.N_q);"), right_on_randn=True),
            mending("tiles of other queries", r"^wrong result", (LOOPED, "mask.key_tiles(i);"),
                    right_on_randn=True),
            mending("all keys are looped over, and asked about", r"^wrong result",
                    (LOOPED, "mask.key_tiles((p.N_q - 1) / Br);\n  tiles.cut = 0;"), right_on_randn=True),
            mending("Q by query, the ranges' O and L by head", r"^wrong result.*in the place of another",
                    OF_Q_AND_O),
            mending("the ranges' O and L by query, Q by head", r"^wrong result.*in the place of another",
                    OF_L),
        )),
]
