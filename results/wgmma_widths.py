"""stages/common/wgmma_widths.cuh: the instruction wgmma for each width, which is a name of its own in PTX.

    python results/wgmma_widths.py            # writes it

Only the lists of registers differ. So they are written by this, and tests/test_hopper.py fails when the file
is not what this makes.
"""

import textwrap
from pathlib import Path

FILE = Path(__file__).parent.parent / "stages/common/wgmma_widths.cuh"
WIDTHS = range(16, 257, 16)
HEAD = """\
// wgmma for each width n: written by results/wgmma_widths.py, and all alike. Included by: wgmma.cuh, which
// says what they do. Operands: D's registers, A (a descriptor, or four registers), B's descriptor, whether D
// counts (else it is 0), which of A and B are MN-major, the type ("C": its text becomes part of the name).
#ifdef __CUDACC__

// The type as the instruction's name has it
template <class T> struct PtxType { static constexpr char name[] = "f16"; };
template <> struct PtxType<__nv_bfloat16> { static constexpr char name[] = "bf16"; };
"""


def lines(text: str, indent: str) -> str:
    return textwrap.fill(text, 110, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def function(n: int, A_in_registers: bool) -> str:
    """wgmma(D, A, B) for D of 64 x n."""
    registers = n // 2
    A_registers = 4 if A_in_registers else 1
    A_first, B, counts = registers, registers + A_registers, registers + A_registers + 1
    majors = [counts + 1] if A_in_registers else [counts + 1, counts + 2]
    kind = majors[-1] + 1
    D_text = ", ".join(f"%{i}" for i in range(registers))
    A_text = ("{" + ", ".join(f"%{A_first + i}" for i in range(4)) + "}") if A_in_registers else f"%{A_first}"
    quoted = "\n".join(f'{" " * 15}"{line} "' for line in textwrap.wrap(f"{{{D_text}}},", 90))
    D_operands = ", ".join(f'"+f"(D[{i // 4}][{i % 4}])' for i in range(registers))
    A_operands = ", ".join(f'"r"(A[{i}])' for i in range(4)) if A_in_registers else '"l"(A)'
    majors_of = ["B"] if A_in_registers else ["A", "B"]
    template = ", ".join(f"bool {x}_mn_major = false" for x in majors_of)
    template += ", class T = ELEMENT" * A_in_registers
    T = "T" if A_in_registers else "ELEMENT"
    major_operands = ", ".join(f'"n"({x}_mn_major)' for x in majors_of)
    A_type = "const uint32_t (&A)[4]" if A_in_registers else "uint64_t A"
    others = f'{A_operands}, "l"(B), "r"(int(accumulate)), {major_operands}, "C"(PtxType<{T}>::name)'
    return (f"template <{template}>\n"
            f"__device__ __forceinline__ void wgmma(float (&D)[{n // 8}][4], {A_type}, uint64_t B,\n"
            f"                                      bool accumulate = true) {{\n"
            f'  asm volatile("{{.reg .pred counts;\\n\\t"\n'
            f'               "setp.ne.b32 counts, %{counts}, 0;\\n\\t"\n'
            f'               "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.%{kind}.%{kind} "\n'
            f"{quoted}\n"
            f'               "{A_text}, %{B}, counts, 1, 1, {", ".join(f"%{m}" for m in majors)};}}"\n'
            f"{lines(': ' + D_operands, ' ' * 15)}\n"
            f"{lines(': ' + others + ');', ' ' * 15)}\n"
            "}\n")


def text() -> str:
    """The file."""
    functions = (function(n, in_registers) for n in WIDTHS for in_registers in (False, True))
    return HEAD + "".join("\n" + f for f in functions) + "\n#endif\n"


if __name__ == "__main__":
    FILE.write_text(text())
