"""CUDA C++ into C++ that g++ compiles, line for line: every message still names a line of the .cu file.

Almost all of CUDA C++ is C++ once a header defines `threadIdx`, `__syncthreads()` and the like, as
include/cuda_runtime.h does.
Three pieces of syntax are not, and are rewritten here:

    kernel<<<grid, block, bytes, stream>>>(args)
                            ->  ::sim::Launcher(grid, block, bytes, stream)("kernel", kernel, args)
    __shared__ float tile[32][33];                 ->  a reference into the block's shared memory
    extern __shared__ float smem[];                ->  a pointer to its dynamic part

And where a pointer X_smem is declared, the checker is told its name:

    float* K_smem = smem + Br * d;                 ->  the same, and SIM_NAME_SHARED(K_smem)

And where a variable is declared without a value, it learns that nothing has written it:

    float O_reg[4];                                ->  the same, and SIM_POISON(O_reg)
"""

import re

_COMMENTS_AND_STRINGS = re.compile(  # a quote after a digit separates thousands: 1'000
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\'', re.S)
_ALIGNMENT = r"(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?"
_TYPE_AND_NAME = r"(?P<type>[\w:\s]+?(?:<[^;\[\]]*>[\w:\s]*?)?)\s*\b(?P<name>\w+)\s*"  # commas within <> only
_KERNEL_NAME = re.compile(r"(?:::\s*)?\b[A-Za-z_]\w*(?:\s*::\s*[A-Za-z_]\w*)*$")
_DYNAMIC_SHARED = re.compile(rf"extern\s+__shared__\s+{_ALIGNMENT}{_TYPE_AND_NAME}\[\s*\]\s*;")
_STATIC_SHARED = re.compile(
    rf"(?P<before>{_ALIGNMENT})(?:static\s+)?__shared__\s+(?P<alignment>{_ALIGNMENT}){_TYPE_AND_NAME}"
    r"(?P<extents>(?:\[[^\];]+\]\s*)*);")
_NAMED_PART = re.compile(  # a whole statement: type, *, name
    r"(?<=[;{}])\s*(?!else\b|do\b|return\b)[\w:]+(?:[\w:\s]|<[\w:,\s]*>)*\*\s*"
    r"(?:const\s+|__restrict__\s+)*"
    r"(?P<name>\w+_smem)\s*=[^;{}]*;")
_WITHOUT_VALUE = re.compile(  # a whole statement: type, and names with extents or without
    rf"(?:^|(?<=[;{{}}]))[ \t]*{_ALIGNMENT}(?:volatile\s+)?"
    r"(?!(?:return|goto|delete|throw|else|using|typedef|struct|class|union|enum|static|extern|case|new)\b)"
    r"(?:(?:unsigned|signed|long|short)\s+)*[\w:]+(?:\s*<[\w:,\s]*>)?\s+(?P<names>\w+\s*(?:\[[^\];]*\]\s*)*"
    r"(?:,\s*\w+\s*(?:\[[^\];]*\]\s*)*)*);", re.M)
_NO_FUNCTION = rf"\b(?:struct|class|union|namespace|extern)\b\s*{_ALIGNMENT}[^;{{}}()]*$"  # before a brace
_OTHER_CUDA_SYNTAX = {
    r"\b__shared__\b": "this form of __shared__ is not understood: declare one array a statement, as in "
                       "`__shared__ float tile[32][33];` or `extern __shared__ float smem[];`",
    r"<<<": "this form of a kernel launch is not understood: write "
            "`kernel<<<grid, block, bytes, stream>>>(arguments)`",
    r"\b(?:asm|__asm__|__asm)\b": "inline PTX cannot run on a CPU: put it between "
                                  "`#ifdef __CUDACC__` and `#else`, with the same in C++ after it",
}


class TranslationError(ValueError):
    """CUDA syntax that the translator does not know; the message starts with file:line."""


def translate(source: str, path: str) -> str:
    """The C++ for a .cu or .cuh file's text.

    Args:
        source: the file's text.
        path: its name, for the `#line` directive and for messages.
    Raises:
        TranslationError: for CUDA syntax outside of what the module's docstring lists.
    """
    code = _blank(source)
    edits = sorted([*_launches(source, code, path), *_shared_arrays(source, code, path), *_named_parts(code),
                    *_without_value(code)])
    _refuse_the_rest(code, edits, path)
    pieces, position = [f'#line 1 "{path}"\n'], 0
    for start, end, replacement in edits:
        lines_lost = source.count("\n", start, end) - replacement.count("\n")
        pieces += [source[position:start], replacement, "\n" * lines_lost]
        position = end
    return "".join(pieces) + source[position:]


def _blank(source: str) -> str:
    """The text with comments, strings and characters as spaces: same length, same lines."""
    return _COMMENTS_AND_STRINGS.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), source)


def _error(code: str, position: int, path: str, message: str) -> TranslationError:
    line = code.count("\n", 0, position) + 1
    return TranslationError(f"{path}:{line}: {message}")


def _closing(code: str, start: int, brackets: str) -> int:
    """The position after the bracket that closes the one at `start`."""
    depth = 0
    for position in range(start, len(code)):
        depth += (code[position] == brackets[0]) - (code[position] == brackets[1])
        if depth == 0:
            return position + 1
    return -1


def _launches(source: str, code: str, path: str):
    """kernel<<<configuration>>>( as edits (start, end, replacement); the arguments after it stay."""
    for launch in re.finditer("<<<", code):
        start = _kernel_start(code, launch.start())
        end = code.find(">>>", launch.end())
        opening = re.compile(r"\s*\(").match(code, end + 3) if end >= 0 else None
        closing = _closing(code, opening.end() - 1, "()") if opening else -1
        if opening is None or start < 0 or closing < 0:
            raise _error(code, launch.start(), path, _OTHER_CUDA_SYNTAX["<<<"])
        kernel = source[start:launch.start()].strip()
        if function := _device_function(code, launch.start()):
            raise _error(code, launch.start(), path,
                         f"{function}() launches {kernel} from the device: kernels are launched by the host "
                         "(in launch(), say). CUDA allows this with dynamic parallelism only, which stages "
                         "are not built with")
        name = " ".join(kernel.split()).replace('"', "")
        comma = ", " if code[opening.end():closing - 1].strip() else ""
        configuration = source[launch.end():end]
        yield start, opening.end(), f'::sim::Launcher({configuration})("{name}", {kernel}{comma}'


def _device_function(code: str, position: int) -> str:
    """The name of the __global__ or __device__ function that a position is in, or ""."""
    for brace in _open_braces(code, position):
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
        *_, brace = [None, *_open_braces(code, pointer.start())]
        if brace is not None and not re.search(_NO_FUNCTION, code[:brace]):
            yield pointer.end(), pointer.end(), f" SIM_NAME_SHARED({pointer['name']})"


def _without_value(code: str):
    for variables in _WITHOUT_VALUE.finditer(code):
        *_, brace = [None, *_open_braces(code, variables.start())]
        if brace is not None and not re.search(_NO_FUNCTION, code[:brace]):
            names = re.findall(r"(\w+)\s*(?:\[[^\]]*\]\s*)*(?:,|$)", variables["names"])
            yield variables.end(), variables.end(), "".join(f" SIM_POISON({name})" for name in names)


def _open_braces(code: str, position: int) -> list[int]:
    """Where the braces stand that are open at a position."""
    open_braces: list[int] = []
    for brace in re.finditer(r"[{}]", code[:position]):
        if brace.group() == "{":
            open_braces.append(brace.start())
        elif open_braces:
            open_braces.pop()
    return open_braces


def _at_file_scope(code: str, position: int) -> bool:
    """True if every brace that is open here belongs to a namespace or to extern "C"."""
    return all(re.search(r"(?:\bnamespace(?:\s+[\w:]+)?|\bextern)\s*$", code[:brace])
               for brace in _open_braces(code, position))


def _refuse_the_rest(code: str, edits: list, path: str) -> None:
    """Raise for CUDA syntax that no edit replaces and that the compiler would misread or explain badly."""
    left = list(_without_gpu_only_code(code))
    for start, end, _ in edits:
        left[start:end] = " " * (end - start)
    rest = "".join(left)
    for pattern, message in _OTHER_CUDA_SYNTAX.items():
        if found := re.search(pattern, rest):
            raise _error(code, found.start(), path, message)


def _without_gpu_only_code(code: str) -> str:
    """Blank what stands between #ifdef __CUDACC__ (or __CUDA_ARCH__) and its #else or #endif."""
    lines, depth, hidden_at = code.split("\n"), 0, None
    for number, line in enumerate(lines):
        directive = line.replace(" ", "")
        if directive.startswith("#if"):
            depth += 1
            if hidden_at is None and re.match(r"#if(def|defined\(?)?__CUDA(CC|_ARCH)__", directive):
                hidden_at = depth
        elif directive.startswith(("#else", "#elif", "#endif")):
            if hidden_at == depth:
                hidden_at = None
            depth -= directive.startswith("#endif")
        if hidden_at is not None:
            lines[number] = " " * len(line)
    return "\n".join(lines)
