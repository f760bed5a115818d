"""The translator: what it rewrites, what it leaves alone, what it refuses; and that no line number moves."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

import flash
from flash_ladder.simulator import TranslationError, translate

LAUNCHES = Path(__file__).parent / "kernels" / "launches.cu"
CPU = torch.device("cpu")


@pytest.fixture
def launches(device):
    """kernels/launches.cu as a library, and a function that makes a tensor of n integers for it."""
    library = ctypes.CDLL(str(flash.build(LAUNCHES, torch.device(device))))
    for name in ("launch_all", "all_arrays", "lanes"):
        getattr(library, name).restype = ctypes.c_char_p
    return library, lambda n: torch.zeros(n, dtype=torch.int32, device=device)


def pointer(x: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def test_every_form_of_a_launch_runs(launches):
    library, integers = launches
    out = integers(19)
    assert library.launch_all(pointer(out), None) is None

    def noted(value, blocks=1, threads=32, blocks_y=1):
        return value + 100 * (blocks + 10 * blocks_y) + 10000 * threads

    assert out.tolist() == [
        noted(1, 2),
        noted(2, 2),
        noted(3, 2),
        noted(9, 2, blocks_y=3),
        noted(74),
        noted(2, 2),
        noted(12 + 6),
        noted(8),
        noted(9),
        7 + 10000 * 64,
        noted(3, 2, 64),
        noted(4),
        noted(0),
        noted(1),
        noted(2),
        noted(16),
        noted(17),
        noted(1_001_000),
        noted(11, 2),
    ]


@pytest.mark.parametrize("dynamic_count", [0, 1, 1000])
def test_every_form_of_shared_memory(launches, dynamic_count):
    """Arrays keep what is written to them: so no two of them overlap. And they are as aligned as they say."""
    library, integers = launches
    errors, alignments = integers(13), integers(4) - 1
    assert library.all_arrays(pointer(errors), pointer(alignments), dynamic_count) is None
    assert errors.tolist() == [0] * 13
    assert alignments.tolist() == [0] * 4


def test_assembly_between_ifdef_and_else(launches):
    library, integers = launches
    out = integers(40) - 1
    assert library.lanes(pointer(out)) is None
    assert out.tolist() == [i % 32 for i in range(40)]


@pytest.mark.parametrize(
    "source, expected",
    [
        ("k<<<g, b>>>(x, y);", '::sim::Launcher(g, b)("k", k, x, y);'),
        ("k<<<g, b, s, st>>>();", '::sim::Launcher(g, b, s, st)("k", k);'),
        (
            "a::k<64, true><<<dim3(1, f(2)), b>>>(f(x, y), (z));",
            '::sim::Launcher(dim3(1, f(2)), b)("a::k<64, true>", a::k<64, true>, f(x, y), (z));',
        ),
        ("if (i < n) k<3><<<g, b>>>(x);", 'if (i < n) ::sim::Launcher(g, b)("k<3>", k<3>, x);'),
        ("k<(a > b)><<<g, b>>>(x);", '::sim::Launcher(g, b)("k<(a > b)>", k<(a > b)>, x);'),
        (
            "k<<<1'000, 1>>>(x); l<<<2'000, 1>>>(x);",
            '::sim::Launcher(1\'000, 1)("k", k, x); ::sim::Launcher(2\'000, 1)("l", l, x);',
        ),
        ("x = cudaLaunchKernelEx(&c[f(1, 2)], a::k<1>, y, z);",
         'x = ::sim::Launcher{&c[f(1, 2)]}("a::k<1>", a::k<1>, y, z);'),
        ("cudaLaunchKernelEx ( &c, k);", '::sim::Launcher{ &c}("k", k);'),
        ("x = a << b; y = a >> b;  // k<<<1, 1>>>(x)", "x = a << b; y = a >> b;  // k<<<1, 1>>>(x)"),
        (
            's = "k<<<1, 1>>>(x) \\" __shared__"; c = \'"\';',
            's = "k<<<1, 1>>>(x) \\" __shared__"; c = \'"\';',
        ),
        ("/* asm(\n__shared__ float a, b; */ int k;", "/* asm(\n__shared__ float a, b; */ int k;"),
    ],
)
def test_the_text(source, expected):
    assert translate(source, "f.cu") == f'#line 1 "f.cu"\n{expected}'


@pytest.mark.parametrize(
    "source, line, message",
    [
        (
            "void k() {\n  __shared__ float a[3], b[4];\n}",
            2,
            "this form of __shared__ is not understood: declare one array a statement",
        ),
        (
            "void k() {\n  __shared__ float a, b;\n}",
            2,
            "this form of __shared__ is not understood: declare one array a statement",
        ),
        ("void f() {\n  cudaLaunchKernelEx(&c);\n}", 2, "write `cudaLaunchKernelEx(configuration, kernel,"),
        ("void k() {\n\n  __shared__ float* a;\n}", 3, "this form of __shared__ is not understood"),
        ("void k() {\n  extern __shared__ float a[3];\n}", 2, "this form of __shared__ is not understood"),
        (
            "// x\n__shared__ float a[3];",
            2,
            "declare `__shared__` arrays inside of the kernel that uses them",
        ),
        (
            "namespace a::b {\nvoid f() {}\n__shared__ float a[3];\n}",
            3,
            "declare `__shared__` arrays inside of the kernel",
        ),
        (
            'extern "C" {\n\nextern __shared__ float a[];\n}',
            3,
            "declare `extern __shared__` inside of the kernel that uses it",
        ),
        ("extern __shared__ float a[];", 1, "declare `extern __shared__` inside of the kernel that uses it"),
        (
            'void k() {\n  asm volatile("exit;");\n}',
            2,
            "inline PTX cannot run on a CPU: put it between `#ifdef __CUDACC__` and `#else`",
        ),
        ('void k() {\n  __asm__("exit;");\n}', 2, "inline PTX cannot run on a CPU"),
        ("__global__ void __cluster_dims__(2) k() {}", 1, "__cluster_dims__ is not understood: launch with"),
        ('#ifdef __CUDACC__\nasm("exit;");\n#else\nasm("nop");\n#endif', 4, "inline PTX cannot run on a CPU"),
        (
            '#ifdef __CUDACC__\n#if 1\n#endif\nasm("exit;");\n#endif\nasm("nop");',
            6,
            "inline PTX cannot run on a CPU",
        ),
        (
            "/*\n*/ void f() { k<<<1, 2>>>; }",
            2,
            "this form of a kernel launch is not understood: write `kernel<<<grid, block, bytes",
        ),
        ("void f() {\n  k<<<1, 2>>(x);\n}", 2, "this form of a kernel launch is not understood"),
        (
            "__global__ void __launch_bounds__(32, 2)\nouter(float* x) {\n  if (x) {\n"
            "    k<64><<<1, 2>>>(x);\n  }\n}",
            4,
            "outer() launches k<64> from the device: kernels are launched by the host",
        ),
        (
            "void f() { k<<<1, 2>>>(); }\n"
            "template <int n> static __host__ __device__ int g() { k<<<n, 2>>>(); }",
            2,
            "g() launches k from the device",
        ),
        ("void f() {\n  k<<<1, 2>>>(x;\n}", 2, "this form of a kernel launch is not understood"),
        ("void f() {\n  table[0]<<<1, 2>>>(x);\n}", 2, "this form of a kernel launch is not understood"),
    ],
)
def test_unknown_syntax_is_refused_at_its_line(source, line, message):
    with pytest.raises(TranslationError, match=f"^{re.escape(f'/a/f.cuh:{line}: {message}')}"):
        translate(source, "/a/f.cuh")


POISONED = {
    "float x;": ["x"],
    "float O_reg[4][rows], m[2], l;": ["O_reg", "m", "l"],
    "alignas(16) float x[8];": ["x"],
    "volatile float x;": ["x"],
    "std::pair<int, float> x;": ["x"],
    "int i, j[2]; unsigned u; long long k[3]; unsigned long int n;": ["i", "j", "u", "k", "n"],
    "if (a) { float x; x = a; }": ["x"],
    "float x = 1.f;": [],
    "float x[2] = {};": [],
    "return x;": [],
    "static float x[4];": [],
    "extern float x;": [],
    "using T = float; typedef float F; struct S { float x; int i[3]; };": [],
    "x = a * b;": [],
    "f(x);": [],
    "float& x = y;": [],
    "goto end;": [],
}


@pytest.mark.parametrize("code, names", POISONED.items())
def test_variables_without_a_value(code, names):
    """Of functions; not those of a file, which are 0, nor members."""
    text = f"struct A {{\n  float a;\n}};\nfloat b;\n__device__ void f(float c) {{\n  {code}\n}}\n"
    translated = translate(text, "f.cu", checked=True)
    assert re.findall(r"SIM_(?:POISON|UNWRITTEN)\((\w+)\)", translated) == names
    plain = re.sub(r" SIM_(?:POISON|UNWRITTEN)\(\w+\)", "", translated)
    assert re.sub(r"SIM_WRITE\((\w+)\)", r"\1", plain) == translate(text, "f.cu") == f'#line 1 "f.cu"\n{text}'


INTEGERS = {  # uses of n, in a scope where it has no value at first
    "n = 1; n == 1; n += 2; n++; --n; x = -n;":
        "W(n) = 1; R(n) == 1; R(n) += 2; R(n)++; --R(n); x = -R(n);",
    "n = n + 1; x = y = n;": "W(n) = R(n) + 1; x = y = R(n);",
    "for (n = 0; n < 4; n++, x += n) a[n] = s.n + p->n + N::n;":
        "for (W(n) = 0; R(n) < 4; R(n)++, x += R(n)) a[R(n)] = s.n + p->n + N::n;",
    "f(n, 1); f(x, n); f(n + 1); f(&n); S s{n}; int& r = n; g((float*)&n); x = y & n; x = y && n;":
        "f(W(n), 1); f(x, W(n)); f(R(n) + 1); f(&W(n)); S s{W(n)}; int& r = W(n); g((float*)&W(n)); "
        "x = y & R(n); x = y && R(n);",
    "min(n, 1); float(n); static_cast<float>(n); (float)n; if (n) return n; x = (n);":
        "min(R(n), 1); float(R(n)); static_cast<float>(R(n)); (float)R(n); if (R(n)) return R(n); "
        "x = (R(n));",
    "n = __shfl_sync(m, n + 1, 0); __popc(n);": "W(n) = __shfl_sync(m, W(n) + 1, 0); __popc(R(n));",
    "(c ? n : x) = 3; (n)++; sizeof(n); assert(n > 0);":
        "(c ? W(n) : x) = 3; (W(n))++; sizeof(n); assert(n > 0);",
    "auto f = [&](int k) { n = k; };": "auto f = [&](int k) { W(n) = k; };",
}
NOT_UNDERSTOOD = [
    "auto f = [n](int k) { return n; };", "auto f = [=](int k) { return n; };", "[&](int& n) { n = 3; };",
    "{ float n; n = 1.f; }", "{ float* n = p; }", "{ float x, n = 3; }", "{ vector<int> n = v; }",
    "for (int i = 0, n = 3; i < n; i++) continue;", "for (auto& n : v) n = 3;", "decltype(n) y = n;",
    "auto [k, n] = pair;", "n[a] = 3;", "\n#define ONE n\nONE = 1;", "\n#if X\nn = 1;\n#endif\n",
]


@pytest.mark.parametrize("code, expected", [*INTEGERS.items(), *((code, None) for code in NOT_UNDERSTOOD)])
def test_uses_of_an_integer_without_a_value(code, expected):
    """Reads and writes; none where a use is not understood: then the variable is as others are."""
    text = "void f() {\n  int n;%s %s\n}\nint n = 0; int g() { return n; }\n"
    if expected is None:
        expected = text % ("", code)
    else:
        uses = re.sub(r"\b([RW])\(n\)", lambda m: f"SIM_{'READ' if m[1] == 'R' else 'WRITE'}(n)", expected)
        expected = text % (" SIM_UNWRITTEN(n)", uses)
    translated = translate(text % ("", code), "f.cu", checked=True)
    translated = re.sub(r" SIM_POISON\(\w+\)|SIM_INDEX\(\w+, (.*?)\)(?=\])", r"\1", translated)
    assert translated == f'#line 1 "f.cu"\n{expected}'


SUBSCRIPTS = {  # I(i) is SIM_INDEX(a, i)
    "f(a[i], x); return a[i];": "f(a[I(i)], x); return a[I(i)];",
    "float& r = a[i]; x = 2 * a[i] + x * a[j]; a[i].go();":
        "float& r = a[I(i)]; x = 2 * a[I(i)] + x * a[I(j)]; a[I(i)].go();",
    "a[b[i]] = 1;": "a[I(b[SIM_INDEX(b, i)])] = 1;",
    "f(a[i][j]);": "f(a[I(i)][SIM_INDEX(a[i], j)]);",
    "a[f(i, j)][k] = 0;": "a[I(f(i, j))][SIM_INDEX((a[f(i, j)]), k)] = 0;",
    "f(s.a[i]);": "f(s.a[SIM_INDEX(s.a, i)]);",
    "p = &a[i]; f(&a[i][j], &(a[i])); x = sizeof(T[4]);": None,
    "float a[4]; float *b, a[4]; T* a[4]; const T<3>* a[4]; float b, a[4]; float (&a)[4] = b;": None,
    "auto [x, y] = f(); delete[] a; f([&](int k) { return k; }); p->a[3] = 1; assert(a[1] > 0);": None,
}


@pytest.mark.parametrize("code, expected", SUBSCRIPTS.items())
def test_indices_of_elements(code, expected):
    """Where they are values; not in declarations, nor where an address is taken."""
    text = "float table[4];\nvoid g(T a[4], float (&b)[3]);\nvoid f() {\n  %s\n}\n"
    expected = re.sub(r"\bI\(", "SIM_INDEX(a, ", expected or code)
    translated = re.sub(r" SIM_POISON\(\w+\)", "", translate(text % code, "f.cu", checked=True))
    assert translated == '#line 1 "f.cu"\n' + text % expected


CUT = "float* K_smem = smem; float* V_smem = K_smem + n; "
PARTS = {  # P(i) is SIM_INDEX_OF_PART(K_smem, V_smem, i); of the others nothing is known
    CUT + "x = K_smem[i] + V_smem[i]; K_smem[j] = 0;":
        CUT + "x = K_smem[P(i)] + V_smem[i]; K_smem[P(j)] = 0;",
    CUT + "{ auto f = [&] { return K_smem[i]; }; }": CUT + "{ auto f = [&] { return K_smem[P(i)]; }; }",
    "float* K_smem = smem; half* V_smem = reinterpret_cast<half*>(K_smem + n); x = K_smem[i];":
        "float* K_smem = smem; half* V_smem = reinterpret_cast<half*>(K_smem + n); x = K_smem[P(i)];",
    "float* K_smem = smem; { float* V_smem = K_smem + n; x = K_smem[i]; } x = K_smem[i];":
        "float* K_smem = smem; { float* V_smem = K_smem + n; x = K_smem[P(i)]; } x = K_smem[i];",
    CUT + "K_smem += n; x = K_smem[i];": None,
    CUT + "float* O_smem = K_smem + m; x = K_smem[i];": None,
    CUT + "{ float* K_smem = other; x = K_smem[i]; }": None,
    CUT + "auto f = [&](float* K_smem) { return K_smem[i]; };": None,
    CUT + "auto f = [K_smem](int k) { return K_smem[k]; };": None,
    CUT + "swap(&K_smem, &x); y = K_smem[i];": None,
    "float* K_smem = smem; float* V_smem = K_smem + (is_one ? 0 : n); x = K_smem[i];": None,
    "float* K_smem = smem; float* V_j = K_smem + n; x = K_smem[i];": None,
}


@pytest.mark.parametrize("code, expected", PARTS.items())
def test_indices_of_parts(code, expected):
    """Of dynamic shared memory: where a pointer is declared as another one, which nothing changes, plus n."""
    text = translate(f"void f(float* smem) {{ {code} }}\n", "f.cu", checked=True)
    text = re.sub(r" SIM_(?:NAME_SHARED|POISON)\(\w+\)", "", text)
    text = re.sub(r"SIM_INDEX\(\w+, (.*?)\)(?=\])", r"\1", text)
    expected = re.sub(r"\bP\(", "SIM_INDEX_OF_PART(K_smem, V_smem, ", expected or code)
    assert text == f'#line 1 "f.cu"\nvoid f(float* smem) {{ {expected} }}\n'


CHECKED = """\
#include <cuda_runtime.h>
struct Bits { int low : 4; };
__global__ void k(float* x, Bits bits) {
  float a[16] = {};
  x[0] = a[bits.low] + %s;
}
"""


def test_a_checked_build_has_no_errors_of_its_own(tmp_path):
    """No reference binds to a bit-field, so SIM_INDEX cannot be here: the kernel is built without it. And an
    error is that of the user's text."""
    source = tmp_path / "bits.cu"
    source.write_text(CHECKED % "1")
    assert flash.build(source, CPU, checked=True).is_file()
    source.write_text(CHECKED % "undeclared")
    column = CHECKED.splitlines()[4].index("%") + 1
    with pytest.raises(RuntimeError, match=rf"bits.cu:5:{column}: error: .undeclared. was not") as raised:
        flash.build(source, CPU, checked=True)
    assert "SIM_" not in str(raised.value)


def test_a_refusal_reaches_the_user_of_build(tmp_path):
    source = tmp_path / "refused.cu"
    source.write_text("__global__ void k() {\n  __shared__ float a[3], b[4];\n}\n")
    with pytest.raises(
        RuntimeError,
        match=f"^cannot translate CUDA for the CPU: {re.escape(str(source))}:2: this form of __shared__",
    ):
        flash.build(source, CPU)


LONG = """\
#include <cuda_runtime.h>
#include "inner/helper.cuh"
template <int N, class T>
__global__ void k(T* x) {
  extern __shared__
      __align__(16)
      float dynamic[];
  __shared__ float
      tile[3]
          [N];
  tile[0][0] = dynamic[0];
  *x = tile[0][0];
}
void f(float* x) {
  k<3,
    float>
      <<<
      1,  // >>>(
      2
      >>>
      (
      x
      );
  undeclared_here(x);
}
extern "C" void run(float* x) { f(x); helped(x); }
"""
HELPER = """\
#pragma once
__global__ void helper(float* x) {
  __shared__ float tile[3]
                       [4];
  *x = tile[0][0] = 1.f;
}
inline void helped(float* x) {
  helper
      <<<1, 2>>>(x);
  %s;
}
"""


def test_translation_keeps_every_line():
    before, after = LONG.splitlines(), translate(LONG, "f.cu").splitlines()[1:]
    assert len(after) == len(before)
    changed = {number for number, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b}
    assert changed == {5, 6, 7, 8, 9, 10, 15, 16, 17, 18, 19, 20, 21}


@pytest.mark.parametrize(
    "helper, message",
    [
        ("x++", "{long}:24:3: error: ‘undeclared_here’ was not declared in this scope"),
        ("undeclared_there(x)", "{helper}:10:3: error: ‘undeclared_there’ was not declared in this scope"),
    ],
)
def test_the_compiler_names_the_line_of_the_original(tmp_path, monkeypatch, helper, message):
    """Of the .cu, and of a .cuh that it includes from a folder beside it."""
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    files = {"long": tmp_path / "long.cu", "helper": tmp_path / "inner" / "helper.cuh"}
    files["helper"].parent.mkdir()
    files["long"].write_text(LONG if helper == "x++" else LONG.replace("undeclared_here(x)", "x++"))
    files["helper"].write_text(HELPER % helper)
    with pytest.raises(RuntimeError) as error:
        flash.build(files["long"], CPU)
    found = str(error.value).replace("'", "’").replace("‘", "’")
    assert message.format(**files).replace("‘", "’") in found


def test_reports_name_the_line_of_the_original(tmp_path):
    """Also for headers of the same name in two folders."""
    source = tmp_path / "two.cu"
    for name, threads in (("a", 40), ("b", 50)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.cuh").write_text(
            "\n" * threads + f"__global__ void {name}() {{ if (threadIdx.x < {threads}) __syncthreads(); "
            "__syncwarp(); }\n"
        )
    source.write_text(
        '#include <cuda_runtime.h>\n#include "a/same.cuh"\n#include "b/same.cuh"\n'
        'extern "C" const char* run(int which) {\n  if (which) a<<<1, 64>>>();\n  else b<<<1, 64>>>();\n'
        "  return cudaGetErrorString(cudaGetLastError());\n}\n"
    )
    library = ctypes.CDLL(str(flash.build(source, CPU)))
    library.run.restype = ctypes.c_char_p
    for which, name, threads in ((1, "a", 40), (0, "b", 50)):
        assert (
            f"wait at __syncthreads() at {tmp_path / name / 'same.cuh'}:{threads + 1} "
            in library.run(which).decode()
        )
