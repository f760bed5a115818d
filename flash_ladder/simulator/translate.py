"""CUDA C++ into C++ that g++ compiles, line for line: every message still names a line of the .cu file.

Almost all of CUDA C++ is C++ once a header defines `threadIdx`, `__syncthreads()` and the like, as
include/cuda_runtime.h does.
Three pieces of syntax are not, and are rewritten here, and a call that lacks the kernel's name:

    kernel<<<grid, block, bytes, stream>>>(args)
                            ->  ::sim::Launcher(grid, block, bytes, stream)("kernel", kernel, args)
    cudaLaunchKernelEx(config, kernel, args)
                            ->  ::sim::Launcher{config}("kernel", kernel, args)
    __shared__ float tile[32][33];                 ->  a reference into the block's shared memory
    extern __shared__ float smem[];                ->  a pointer to its dynamic part

And where a pointer X_smem is declared, the checker is told its name:

    float* K_smem = smem + Br * d;                 ->  the same, and SIM_NAME_SHARED(K_smem)

For checked builds local_variables.py has further edits: by these it learns of reads of local variables that
nothing has written, and of elements outside of arrays.
"""

import functools
import re

from .local_variables import subscripts, without_value
from .scan import ALIGNMENT, blank, closing, innermost_block, open_braces, without_gpu_only_code

_TYPE_AND_NAME = r"(?P<type>[\w:\s]+?(?:<[^;\[\]]*>[\w:\s]*?)?)\s*\b(?P<name>\w+)\s*"  # commas within <> only
_KERNEL_NAME = re.compile(r"(?:::\s*)?\b[A-Za-z_]\w*(?:\s*::\s*[A-Za-z_]\w*)*$")
_DYNAMIC_SHARED = re.compile(rf"extern\s+__shared__\s+{ALIGNMENT}{_TYPE_AND_NAME}\[\s*\]\s*;")
_STATIC_SHARED = re.compile(
    rf"(?P<before>{ALIGNMENT})(?:static\s+)?__shared__\s+(?P<alignment>{ALIGNMENT}){_TYPE_AND_NAME}"
    r"(?P<extents>(?:\[[^\];]+\]\s*)*);")
_NAMED_PART = re.compile(  # a whole statement: type, *, name
    r"(?<=[;{}])\s*(?!else\b|do\b|return\b)[\w:]+(?:[\w:\s]|<[\w:,\s]*>)*\*\s*"
    r"(?:const\s+|__restrict__\s+)*"
    r"(?P<name>\w+_smem)\s*=[^;{}]*;")
_OTHER_CUDA_SYNTAX = {
    r"\b__shared__\b": "this form of __shared__ is not understood: declare one array a statement, as in "
                       "`__shared__ float tile[32][33];` or `extern __shared__ float smem[];`",
    r"<<<": "this form of a kernel launch is not understood: write "
            "`kernel<<<grid, block, bytes, stream>>>(arguments)`",
    r"\b__cluster_dims__\b": "__cluster_dims__ is not understood: launch with cudaLaunchKernelEx and "
                            "cudaLaunchAttributeClusterDimension",
    r"\b(?:asm|__asm__|__asm)\b": "inline PTX cannot run on a CPU: put it between "
                                  "`#ifdef __CUDACC__` and `#else`, with the same in C++ after it",
}


class TranslationError(ValueError):
    """CUDA syntax that the translator does not know; the message starts with file:line."""


@functools.lru_cache(256)  # the files of stages/common are in each build
def translate(source: str, path: str, checked: bool = False) -> str:
    """The C++ for a .cu or .cuh file's text.

    Args:
        source: the file's text.
        path: its name, for the `#line` directive and for messages.
        checked: with what the checker asks of local variables (local_variables.py).
    Raises:
        TranslationError: for CUDA syntax outside of what the module's docstring lists.
    """
    code = blank(source)
    replacing = [*_launches(source, code, path), *_shared_arrays(source, code, path)]
    added = [*without_value(code), *subscripts(source, code)] if checked else []
    inserting = [edit for edit in added
                 if not any(start < edit[1] and edit[0] < end for start, end, _ in replacing)]
    edits = sorted([*replacing, *_named_parts(code), *inserting], key=lambda edit: edit[:2])
    _refuse_the_rest(code, edits, path)
    pieces, position = [f'#line 1 "{path}"\n'], 0
    for start, end, replacement in edits:
        lines_lost = source.count("\n", start, end) - replacement.count("\n")
        pieces += [source[position:start], replacement, "\n" * lines_lost]
        position = end
    return "".join(pieces) + source[position:]


def _error(code: str, position: int, path: str, message: str) -> TranslationError:
    line = code.count("\n", 0, position) + 1
    return TranslationError(f"{path}:{line}: {message}")


def _launches(source: str, code: str, path: str):
    """kernel<<<configuration>>>( as edits (start, end, replacement); the arguments after it stay."""
    for launch in re.finditer("<<<", code):
        start = _kernel_start(code, launch.start())
        end = code.find(">>>", launch.end())
        opening = re.compile(r"\s*\(").match(code, end + 3) if end >= 0 else None
        last = closing(code, opening.end() - 1, "()") if opening else -1
        if opening is None or start < 0 or last < 0:
            raise _error(code, launch.start(), path, _OTHER_CUDA_SYNTAX["<<<"])
        kernel = source[start:launch.start()].strip()
        if function := _device_function(code, launch.start()):
            raise _error(code, launch.start(), path,
                         f"{function}() launches {kernel} from the device: kernels are launched by the host "
                         "(in launch(), say). CUDA allows this with dynamic parallelism only, which stages "
                         "are not built with")
        comma = ", " if code[opening.end():last - 1].strip() else ""
        configuration = source[launch.end():end]
        yield start, opening.end(), f'::sim::Launcher({configuration})({_name(kernel)}, {kernel}{comma}'
    for launch in re.finditer(r"\bcudaLaunchKernelEx\s*\(", code):
        commas = _commas(code, launch.end())
        if not commas:
            raise _error(code, launch.start(), path,
                         "write `cudaLaunchKernelEx(configuration, kernel, arguments)`")
        kernel = source[commas[0] + 1:commas[1]].strip()
        configuration = source[launch.end():commas[0]]
        yield launch.start(), commas[1], f"::sim::Launcher{{{configuration}}}({_name(kernel)}, {kernel}"


def _name(kernel: str) -> str:
    """Of a kernel, as a string in C++."""
    return '"' + " ".join(kernel.split()).replace('"', "") + '"'


def _commas(code: str, first: int) -> list[int]:
    """Where the first and the second argument end, of a call whose arguments begin at `first`; []: there are
    not two."""
    ends, depth = [], 0
    for position in range(first, len(code)):
        depth += (code[position] in "([{") - (code[position] in ")]}")
        if depth < 0 or depth == 0 and code[position] == ",":
            ends.append(position)
        if depth < 0 or len(ends) == 2:
            break
    return ends if len(ends) == 2 else []


def _device_function(code: str, position: int) -> str:
    """The name of the __global__ or __device__ function that a position is in, or ""."""
    for brace in open_braces(code, position):
        head = re.split(r"[;{}]", code[:brace])[-1]
        if re.search(r"\b__(?:global|device)__\b", head):
            head = re.sub(r"\b(?:__launch_bounds__|__align__|alignas)\s*\([^()]*\)", "", head)
            name = re.search(r"(\w+)\s*\(", head)
            return name[1] if name else "a __device__ function"
    return ""


def _kernel_start(code: str, end: int) -> int:
    """Where the kernel before the `<<<` at `end` starts, a name and perhaps template arguments; -1: none."""
    end = len(code[:end].rstrip())
    if code[:end].endswith(">"):
        angles = parentheses = 0
        for position in reversed(range(end)):
            parentheses += (code[position] == ")") - (code[position] == "(")
            if parentheses == 0:          # within them, < and > compare
                angles += (code[position] == ">") - (code[position] == "<")
            if angles == 0 or parentheses < 0 or code[position] in ";{}":
                break
        end = len(code[:position].rstrip())
    name = _KERNEL_NAME.search(code[:end])
    return name.start() if name else -1


def _shared_arrays(source: str, code: str, path: str):
    for array in _DYNAMIC_SHARED.finditer(code):
        if _at_file_scope(code, array.start()):
            raise _error(code, array.start(), path,
                         "declare `extern __shared__` inside of the kernel that uses it")
        type_, name = source[slice(*array.span("type"))].strip(), array["name"]
        site = f"{path}:{code.count(chr(10), 0, array.start()) + 1}"
        yield *array.span(), f'{type_}* const {name} = ::sim::shared_dynamic<{type_}>("{name}", "{site}");'
    for array in _STATIC_SHARED.finditer(code):
        if code[:array.start()].rstrip().endswith("extern"):
            continue
        if _at_file_scope(code, array.start()):
            raise _error(code, array.start(), path,
                         "declare `__shared__` arrays inside of the kernel that uses them")
        type_, name, extents = (source[slice(*array.span(g))].strip() for g in ("type", "name", "extents"))
        alignment = f"{array['before']} {array['alignment']}".strip().replace("__align__", "alignas")
        site = f"{path}:{code.count(chr(10), 0, array.start()) + 1}"
        # `using` needs the extents after a name; a struct's member has them there
        yield *array.span(), (
            f"struct {alignment} {name}_in_shared {{ {type_} array{extents}; }}; auto& {name} = "
            f'::sim::shared_static<{name}_in_shared>("{name}", "{site}").array;')


def _named_parts(code: str):
    for pointer in _NAMED_PART.finditer(code):
        if innermost_block(code, pointer.start()) >= 0:
            yield pointer.end(), pointer.end(), f" SIM_NAME_SHARED({pointer['name']})"


def _at_file_scope(code: str, position: int) -> bool:
    """True if every brace that is open here belongs to a namespace or to extern "C"."""
    return all(re.search(r"(?:\bnamespace(?:\s+[\w:]+)?|\bextern)\s*$", code[:brace])
               for brace in open_braces(code, position))


def _refuse_the_rest(code: str, edits: list, path: str) -> None:
    """Raise for CUDA syntax that no edit replaces and that the compiler would misread or explain badly."""
    left = list(without_gpu_only_code(code))
    for start, end, _ in edits:
        left[start:end] = " " * (end - start)
    rest = "".join(left)
    for pattern, message in _OTHER_CUDA_SYNTAX.items():
        if found := re.search(pattern, rest):
            raise _error(code, found.start(), path, message)
