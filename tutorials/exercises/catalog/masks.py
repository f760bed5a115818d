"""Exercises and bug hunts over masks: lesson 10."""

from ..exercise import Exercise
from .forward import wrong
from .hunts import LOOK, changes, mending, paragraphs

FIRST_KEY = "  __device__ int first_key(int row) const { return row + from; }\n"
END_KEY = "  __device__ int end_key(int row) const { return row + to + 1; }\n"
SEES = "  __device__ bool sees(int row, int col) const { return col >= row + from && col <= row + to; }\n"
SKIP = "if (q.greatest < 0 || k.least > unsigned(q.greatest)) return SKIPPED;"
KIND = "return q.least >= 0 && k.greatest <= unsigned(q.least) ? WHOLE : CUT;"
LEAK = "return q.least == k.least && q.greatest == k.greatest ? WHOLE : CUT;"
RIGHT = "return q.least == k.greatest && k.least == q.greatest ? WHOLE : CUT;"
BAD_SKIP = r"^wrong result.*SKIPPED whose greatest query sees its least key"
BAD_WHOLE = r"^wrong result.*WHOLE whose least query does not see its greatest key"
FIRST_ROW = "first_row(int col) const { return col - diagonal; }"
TILES = {"Br": 32, "Bc": 32}


def as_kind(kind: str, *more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """A window that inherits another kind."""
    return (("struct Rule : KeyRange {", f"struct Rule : {kind} {{"), *more)


EXERCISES = [
    Exercise(
        number=27, name="window", title="A sliding window", lesson="10", direction="fwd",
        stage="exp2", mask="window", sections=("which keys a query sees",), tiles=TILES,
        at_most={"hbm": 1.05},
        specification="""
Write the mask's struct Rule, from scratch. The query of `row` sees the keys from row + from to row + to, both
included. `from` and `to` are its first and its second int, a.integer(0) and a.integer(1).
(flash.masks.window(left, right) makes them: N_k - N_q - left and N_k - N_q + right, and -2^30 and 2^30 for a
side without a limit.)

Rule inherits one of the kinds of stages/common/rule.cuh, and defines what that one asks for. A kernel makes
it once a block, by Rule(const Arguments& a, int b, int h), for batch element b and head h. All its functions
are __device__.

Any row may be asked for, also one past the last query. What comes out may be below 0 or past the last key:
the kernel cuts it off. Some rows see no key, and some windows are wider than the sequence.

A tile of which no query sees a key must be skipped: the check counts HBM traffic.
""",
        hints=(
            "Causal, in stages/masks/causal.cuh, is KeysFrom0: each row's keys begin with key 0. Do those of "
            "a window?",
            "The keys of a row are neighbours, and neither the first nor the last one moves back from a row "
            "to the next. Which kind is that? It finds the tiles by itself.",
            "A KeyRange has first_key(row), the first key that is seen, and end_key(row), the one after the "
            "last."),
        mutants=(
            wrong("a score of -infinity", r"^too much traffic.*no tile is skipped.*excess is of K",
                  *as_kind("AllKeys", (
                      ": from(a.integer(0))", ": AllKeys(a, b, h), from(a.integer(0))"), (
                      FIRST_KEY + END_KEY,
                      "  static constexpr bool scores = true;\n"
                      "  __device__ float score(float x, int row, int col) const {\n"
                      "    return col >= row + from && col <= row + to ? x : -INFINITY;\n  }\n")),
                  right_on_randn=True),
            wrong("every tile is cut", r"^too much traffic.*no tile is skipped.*excess is of K",
                  *as_kind("AnyKeys", (FIRST_KEY + END_KEY, SEES + "  __device__ TileKind kind(const Tile& "
                                       "tile) const { return CUT; }\n")), right_on_randn=True),
            wrong("no tile before the window is skipped", r"^too much traffic.*excess is of K",
                  *as_kind("AnyKeys", (FIRST_KEY + END_KEY, SEES +
                                       "  __device__ TileKind kind(const Tile& tile) const {\n"
                                       "    return tile.col >= tile.end_row + to ? SKIPPED : CUT;\n  }\n")),
                  right_on_randn=True),
            wrong("the last key is the end", r"^wrong result.*right edge is off by one.*key too few",
                  ("row + to + 1", "row + to")),
            wrong("the key after the first", r"^wrong result.*left edge is off by one.*key too few",
                  ("return row + from;", "return row + from + 1;")),
            wrong("no left edge", r"^wrong result.*there is no left edge",
                  *as_kind("KeysFrom0", (FIRST_KEY, "  __device__ int first_row(int col) const "
                                         "{ return col - to; }\n"))),
            wrong("sees() of a KeyRange", r"^wrong result.*there is no mask.*first_key\(\) and end_key\(\)",
                  (FIRST_KEY + END_KEY, SEES)),
            wrong("from and to exchanged", r"^wrong result.*have changed places",
                  ("from(a.integer(0)), to(a.integer(1))", "from(a.integer(1)), to(a.integer(0))")),
            wrong("tiles skipped by their first row", r"^wrong result.*skipped of which the first row",
                  *as_kind("AnyKeys", (FIRST_KEY + END_KEY, SEES +
                                       "  __device__ TileKind kind(const Tile& tile) const {\n"
                                       "    const bool some = tile.end_col > tile.row + from && "
                                       "tile.col <= tile.row + to;\n"
                                       "    return some ? ASK : SKIPPED;\n  }\n"))),
            wrong("the corners of a tile", r"^wrong result.*taken for whole",
                  *as_kind("AnyKeys", (FIRST_KEY + END_KEY, SEES +
                                       "  __device__ TileKind kind(const Tile& tile) const {\n"
                                       "    return sees(tile.row, tile.col) && sees(tile.end_row - 1, "
                                       "tile.end_col - 1) ? WHOLE : ASK;\n  }\n"))),
            wrong("no __device__", r"^does not compile.*end_key\(\), which lacks __device__",
                  ("  __device__ int end_key", "  int end_key")),
        )),
    Exercise(
        number=28, name="tile_kind", title="What a tile is", lesson="10", direction="fwd", stage="exp2",
        mask="block_causal", sections=("what a tile is",), tiles=TILES, at_most={"hbm": 1.03},
        specification="""
Queries and keys have block numbers, in any order: a query sees the keys of its own block and of those with
smaller numbers. A negative number is padding: it sees nothing and is not seen. sees() says it for each pair.

Write kind(), which says what a tile is before anyone asks for its pairs: SKIPPED if no query of it sees a key
of it; WHOLE if each of its queries sees each of its keys; else CUT. (ASK would be right, too: then every pair
is asked for. The check counts the bytes that this reads.)

Given: q, the least and the greatest block number of the tile's queries. k, those of its keys, but as unsigned
numbers: there -1 is 4294967295, so padding is above all blocks. tile.row to tile.end_row - 1 and tile.col to
tile.end_col - 1 are all there.

SKIPPED or WHOLE in vain makes the result wrong, and CUT in vain costs: the stage, exp2, asks for the single
pairs of a tile only where that is CUT.
""",
        hints=(
            "Which query of the tile sees most? Which key is seen by most queries? If that query does not "
            "see that key, nobody sees anything.",
            "And which query sees least, and which key is seen least? If that query sees that key, everybody "
            "sees everything.",
            "C++ compares an int and an unsigned number as unsigned ones: q.greatest = -1 would then be "
            "above all keys. Treat a q that is below 0 first."),
        mutants=(
            wrong("each pair is asked for", r"^too much traffic.*mask\.(keys|queries)",
                  (KIND, "return ASK;"), right_on_randn=True),
            wrong("every tile is cut", r"^too much traffic.*no tile is skipped", (SKIP, ""),
                  (KIND, "return CUT;"), right_on_randn=True),
            wrong("no tile is whole", r"^too much traffic.*mask\.(keys|queries)", (KIND, "return CUT;"),
                  right_on_randn=True),
            wrong("padding of queries is not skipped", r"^too much traffic",
                  ("q.greatest < 0 || ", ""), right_on_randn=True),
            wrong("skipped by the greatest key", BAD_SKIP,
                  ("k.least > unsigned(q.greatest)", "k.greatest > unsigned(q.greatest)")),
            wrong("skipped by the least query", BAD_SKIP,
                  ("k.least > unsigned(q.greatest)", "k.least > unsigned(q.least)")),
            wrong("whole by the greatest query", BAD_WHOLE,
                  ("k.greatest <= unsigned(q.least)", "k.greatest <= unsigned(q.greatest)")),
            wrong("whole by the least key", BAD_WHOLE,
                  ("k.greatest <= unsigned(q.least)", "k.least <= unsigned(q.least)")),
            wrong("a padded query sees all", r"^wrong result.*WHOLE with a query that is padding",
                  ("q.least >= 0 && ", "")),
            wrong("padding with a sign", r"^wrong result.*WHOLE with a key that is padding",
                  ("k.greatest <= unsigned(q.least)", "int(k.greatest) <= q.least")),
        )),
    Exercise(
        number=29, name="leak", title="One document leaks", lesson="10", direction="fwd", stage="exp2",
        mask="document", tiles=TILES, at_most={"hbm": 1.03},
        specification=f"""
A colleague writes: "I pack short texts into one sequence, and a query sees its own document only. If every
text has a multiple of 64 tokens, O is that of the texts alone. With other lengths it is not: some rows change
when I change a text that they should not see. In the stage cp_async it is right for every length, in exp2 it
is not. So it must be exp2." It is not.
{LOOK}  q, k, v = torch.randn(3, 1, 2, 128, 64, dtype=torch.bfloat16)
  ids = torch.tensor([0] * 20 + [1] * 30 + [2] * 78, dtype=torch.int32)
  mask = flash.masks.from_file("mine/29_leak.cuh", ids.view(1, 1, -1, 1), ids.view(1, 1, 1, -1))
  print(mask.tiles(128, Br=64, Bc=64))
  for stage in ("cp_async", "exp2"):
      print(flash.attention(q, k, v, mask=mask, stage=stage)[0, 0, :3, :4])

All tiles that can be skipped or are whole must still be called so.
""",
        hints=(
            "What does exp2 do in another way than cp_async? Its header says where it asks the mask.",
            "mask.tiles(...).plot(\"tiles.png\") draws what each tile is called, and which pairs count. "
            "Which tile is called something that it is not?",
            "A tile has the documents 0, 1 and 2, in its queries and in its keys. What do the least and the "
            "greatest number say, and what not?"),
        answer=paragraphs("""
A tile on the diagonal has the same documents in its queries as in its keys. So least is least and greatest
is greatest, and it was called WHOLE. But a tile is whole only if all queries and all keys are of one
document: if the least query's document is the greatest key's, and the least key's the greatest query's.

cp_async asks for each pair, whatever the tile is called. exp2 believes it: of a WHOLE tile it asks for no
pair, so that there every query sees every key. Where texts end with their tiles, a tile has one document, and
all is right.

kind() is a promise. A wrong CUT costs time, a wrong SKIPPED or WHOLE costs the result. A test needs documents
that end within a tile, and a stage that believes."""),
        broken=changes((RIGHT, LEAK)),
        mutants=(
            mending("nothing that matters", r"^wrong result.*WHOLE that has several documents",
                    ("const Extent<int> q", "const Extent<int>  q"), (LEAK, LEAK.replace("return", "return "
                                                                                      "true &&")),
                    right_on_randn=True),
            mending("one document of queries, and the keys' greatest",
                    r"^wrong result.*WHOLE that has several documents",
                    (LEAK, "return q.least == q.greatest && q.greatest == k.greatest ? WHOLE : CUT;"),
                    right_on_randn=True),
            mending("the first pair", r"^wrong result.*(called WHOLE|taken for whole)",
                    (LEAK, "return sees(tile.row, tile.col) ? WHOLE : CUT;"), right_on_randn=True),
            mending("the first and the last pair", r"^wrong result.*WHOLE that has several documents",
                    (LEAK, "return sees(tile.row, tile.col) && sees(tile.end_row - 1, tile.end_col - 1) "
                           "? WHOLE : CUT;"), right_on_randn=True),
            mending("nothing is whole", r"^too much traffic.*mask\.(keys|queries)",
                    (LEAK, "return CUT;"), right_on_randn=True),
            mending("each pair is asked for", r"^too much traffic.*mask\.(keys|queries)",
                    (LEAK, "return ASK;"), right_on_randn=True),
            mending("skipped, where it is not the same", r"^wrong result.*SKIPPED that has pairs",
                    ("if (q.greatest < k.least || k.greatest < q.least) return SKIPPED;",
                     "if (q.least != k.least) return SKIPPED;"),
                    (LEAK, RIGHT)),
        )),
    Exercise(
        number=30, name="prefix", title="Right forward, wrong backward", lesson="10", direction="bwd",
        stage="recompute", mask="prefix", tiles=TILES, at_most={"hbm": 1.03},
        specification=f"""
A colleague writes: "With my prefix mask O and L are right, for every length. With a prefix of one tile or
less the gradients are, too. With a longer one dQ, dK and dV are wrong: dK and dV in rows of the prefix, dQ in
the first rows. The loss falls all the same, only more slowly than it did."
{LOOK}  q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 128, 64))
  length = torch.full((1, 1, 1, 1), 100, dtype=torch.int32)
  mask = flash.masks.from_file("mine/30_prefix.cuh", length, ints=[0])
  o = flash.attention(q, k, v, mask=mask, backward="recompute", Br_bwd=32, Bc_bwd=32)
  print(torch.autograd.grad(o.sum(), v)[0][0, 0, :, 0])     # in the first rows: sums of too few

The int is the diagonal, N_k - N_q. Tiles that nobody sees must still be skipped.
""",
        hints=(
            "In the forward pass a block has a tile of queries, and asks which keys these see. What has a "
            "block in the backward pass, and what does it ask?",
            "query_tiles() in stages/common/mask.cuh: the loop over the tiles of queries begins with the "
            "tile of a row. Which one?",
            "Which is the first row that sees key 40, if the prefix has 100 keys? And key 100, if the "
            "diagonal is 0?"),
        answer=paragraphs("""
first_row(col) was that of a causal mask: col - diagonal. But all rows see a key of the prefix, so its first
row is row 0. In the backward pass a block has a tile of keys and walks along the queries. It began with the
tile of the row col - diagonal, and left those before it out: their parts were missing in dK and dV, and the
tile's part in their dQ.

The forward pass never asks for first_row: it walks along the keys, up to end_key. The two functions say one
thing from two sides, and must agree. (AnyKeys has sees() alone, so that nothing can disagree.)

A mask needs a test of the backward pass, with a prefix of more than one tile. A loss that falls is no such
test."""),
        broken=changes(("first_row(int col) const { return col < length ? 0 : col - diagonal; }", FIRST_ROW)),
        mutants=(
            mending("bounds, which the kernel has", r"^wrong result.*knows nothing of the prefix",
                    (FIRST_ROW, "first_row(int col) const { return max(col - diagonal, 0); }"),
                    right_on_randn=True),
            mending("all rows", r"^too much traffic",
                    (FIRST_ROW, "first_row(int col) const { return 0; }"), right_on_randn=True),
            mending("the key after the prefix, too", r"^too much traffic",
                    (FIRST_ROW, "first_row(int col) const { return col <= length ? 0 : col - diagonal; }"),
                    right_on_randn=True),
            mending("without the diagonal", r"^wrong result.*lacks the diagonal",
                    (FIRST_ROW, "first_row(int col) const { return col < length ? 0 : col; }"),
                    right_on_randn=True),
            mending("the larger of the two", r"^wrong result.*too late",
                    (FIRST_ROW, "first_row(int col) const { return max(length, col - diagonal); }")),
            mending("the prefix's end", r"^wrong result.*knows nothing of the prefix",
                    (FIRST_ROW, "first_row(int col) const { return col > length ? 0 : col - diagonal; }")),
        )),
]
