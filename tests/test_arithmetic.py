"""The arithmetic of stage headers: as Python's own, and nothing else."""

import random

import pytest
import torch

import flash
from flash_ladder.arithmetic import ArithmeticProblem, ceil_div, divisor, evaluate, next_power_of_2

NAMES = {"d": 64, "Br": 128, "Bc": 32, "rows": 1 << 20, "causal": True, "x": -7}
WRITTEN = [
    "d + Br - Bc * 3", "Br / Bc", "-x // 4", "x % 5", "(d + 63) // 64 * 64", "2 ** 10", "5 ** (Br > Bc)",
    "1 << 7", "d > 64", "Br in (32, 64, 128)", "x not in (1, 2)",
    "32768 <= rows < 2 ** 21 and d == 64 and not causal", "d <= 64 or rows < 5 and causal",
    "4 if d <= 128 else 2", "max(Br, 64, d)", "min(Bc, 32) // 32", "+d", "1.5 * d", "3 < 5 < 4",
    "(Br, Bc) == (128, 32)",
]


@pytest.mark.parametrize("text", WRITTEN)
def test_as_in_python(text):
    assert evaluate(text, **NAMES) == eval(text, {"min": min, "max": max}, NAMES)


def random_expression(depth: int) -> str:
    if not depth or random.random() < 0.2:
        return random.choice([*NAMES, str(random.randint(0, 99))])
    a, b, c = (random_expression(depth - 1) for _ in range(3))
    return random.choice([f"({a} {random.choice(['+', '-', '*', '//', '%', '<', '<=', '==', '!='])} {b})",
                          f"({a} and {b}) + 0 * {c}", f"({a} if {b} else {c})", f"max({a}, {b})", f"(-{a})",
                          f"(not {a})", f"({a} < {b} <= {c})"])


def test_random_expressions_as_in_python():
    random.seed(0)
    compared = 0
    for _ in range(2000):
        text = random_expression(4)
        try:
            expected = eval(text, {"max": max}, NAMES)
        except ZeroDivisionError:
            with pytest.raises(ArithmeticProblem):
                evaluate(text, **NAMES)
            continue
        if " and " not in text and abs(expected) < 2**79:  # Python's `and` gives an operand, ours a bool
            assert evaluate(text, **NAMES) == expected, text
            compared += 1
    assert compared > 500


def test_functions():
    for a in range(1, 300):
        assert ceil_div(a, 7) == (a + 6) // 7 == evaluate("ceil_div(a, 7)", a=a)
        power = evaluate("next_power_of_2(a)", a=a)
        assert power == next_power_of_2(a) and power >= a > power // 2 and power & (power - 1) == 0
    for a, most, found in [(12, 5, 4), (12, 12, 12), (12, 99, 12), (7, 6, 1), (8, 0, 1), (8, -3, 1)]:
        assert evaluate("divisor(a, most)", a=a, most=most) == found == divisor(a, most)


@pytest.mark.parametrize("text, message", {
    "d.bit_length()": r"d.bit_length\(\) is no arithmetic",
    "__import__('os')": r"is no arithmetic: there are \+ - \* /",
    "().__class__": "is no arithmetic",
    "abs(d)": "abs(d) is no arithmetic: .*, min, max, ceil_div, next_power_of_2, divisor",
    "max(*(1, 2))": r"\*\(1, 2\) is no arithmetic",
    "min(1, key=2)": "is no arithmetic",
    "lambda: 1": "is no arithmetic",
    "[x for x in (1, 2)]": "is no arithmetic",
    "f'{d}'": "is no arithmetic",
    "'text'": "is no arithmetic",
    "(d := 1)": "is no arithmetic",
    "d[0]": "is no arithmetic",
    "d & 1": "is no arithmetic",
    "d is 1": "is no arithmetic",
    "9 ** 9 ** 9": "an exponent must be an integer from 0 to 80, not 387420489",
    "2 ** -1": "an exponent must be an integer from 0 to 80, not -1",
    "1 << 10 ** 9": "a shift must be by an integer from 0 to 80",
    "2 ** 80 * 2": "a number is above 2.80",
    "divisor(0, 1)": "divisor.. takes numbers from 1 to 65536, not 0",
    "divisor(2 ** 70, 3)": "divisor.. takes numbers from 1 to 65536",
    "1e300": "a number is above 2.80",
    "(1, 2) * 9": r"\(1, 2\) is no number",
    "1 < (1, 2)": "not supported between",
    "D * 4": "D is not known here; d, Br, Bc, rows, causal, x are",
    "d // 0": "integer division or modulo by zero|integer modulo by zero",
    "1 + ": "invalid syntax",
    "d; d": "invalid syntax",
    "": "invalid syntax",
    "1 + " * 300 + "1": "it has 1201 characters; at most 1000 are read",
    "(" * 400 + "1" + ")" * 400: "nested|parenthes|memory",
    "-" * 100 + "1": "nested more than 50 levels deep",
    "x" + ".b" * 490: "is no arithmetic",
}.items())
def test_nothing_else(text, message):
    with pytest.raises(ArithmeticProblem, match=message.replace("(d)", r"\(d\)")):
        evaluate(text, **NAMES)


def test_the_message_names_the_place(tmp_path):
    mine = tmp_path / "mine.cuh"
    mine.write_text("// Forward stage 1: mine\n// tiles:   Br=16 Bc=32; d > 128: Br=16 Bc=16\n"
                    "// shared:  4 * Br *\n//          (D + 1)\n")
    with pytest.raises(ValueError, match=rf"^{mine}:3: shared: .* \(D \+ 1\).: D is not known"):
        flash.read_stage(mine)
    mine.write_text("// shared: 4096 // (d - 128)\n")
    stage = flash.read_stage(mine)
    with pytest.raises(ValueError, match=rf"^{mine}:1: shared: .*: integer division or modulo by zero"):
        stage.tiles(128, 65536)


def test_a_byte_order_mark(tmp_path):
    """As some editors write it: the stage is read and runs."""
    mine = tmp_path / "mine.cuh"
    text = (flash.STAGES / "fwd_04_flash2.cuh").read_text()
    mine.write_bytes(text.replace("tiles:   Br=64", "tiles:   Br=32", 1).encode("utf-8-sig"))
    assert flash.read_stage(mine).default_tiles(64)["Br"] == 32
    q, k, v = torch.randn(3, 1, 1, 40, 16)
    torch.testing.assert_close(flash.attention(q, k, v, stage=mine), flash.attention(q, k, v, stage="flash2"))


def test_latin_1(tmp_path):
    mine = tmp_path / "mine.cuh"
    mine.write_bytes("// Forward stage 1: mine\n// by R\u00e9\n".encode("latin-1"))
    with pytest.raises(ValueError, match=rf"^{mine}:2: byte 0xe9 is not UTF-8 .*: save it as UTF-8"):
        flash.read_stage(mine)
    text = (flash.STAGES / "fwd_04_flash2.cuh").read_text()
    mine.write_text('#include "other.cuh"\n' + text)
    (tmp_path / "other.cuh").write_bytes(b"// \xe9\n")
    with pytest.raises(ValueError, match="other.cuh:1: byte 0xe9 is not UTF-8"):
        flash.attention(*torch.randn(3, 1, 1, 8, 8), stage=mine)


def test_a_double_quote_in_the_path(tmp_path):
    mine = tmp_path / 'my "best".cuh'
    mine.write_text((flash.STAGES / "fwd_04_flash2.cuh").read_text())
    with pytest.raises(ValueError, match="the path has a double quote, which no #include can name"):
        flash.read_stage(mine)
