"""What a checked build asks of local variables: edits that the translator makes, and no other build sees.

A variable that is declared without a value learns that nothing has written it:

    float O_reg[4];               ->  the same, and SIM_POISON(O_reg)

An integer notes when it is written, and a read looks at the note:

    int count;                    ->  the same, and SIM_UNWRITTEN(count)
    count = 0;                    ->  SIM_WRITE(count) = 0;
    sum += count;                 ->  sum += SIM_READ(count);
    f(&count);                    ->  f(&SIM_WRITE(count));            who knows what f does

And g++ takes no index for a mistake where a reference to the element past the end is made, be it as an
argument or by an operator of a class. So indices are compared with the array's length:

    f(S_reg[n], 0.f);             ->  f(S_reg[SIM_INDEX(S_reg, n)], 0.f);

So are those in a part of dynamic shared memory, whose length declarations say (parts.py):

    sum += K_smem[n];             ->  sum += K_smem[SIM_INDEX_OF_PART(K_smem, V_smem, n)];

Each has its place in include/sim/device.h. Where an edit may be wrong there is none: then a mistake may pass.
"""

import re
from collections.abc import Iterator

from .parts import Parts
from .scan import ALIGNMENT, Brackets, innermost_block, without_gpu_only_code

Edit = tuple[int, int, str]   # start, end, what stands there instead
_DECLARATOR = (r"(?P<name>\w+)\s*(?P<extents>(?:\[[^\];]*\]\s*)*)"
               r"(?P<value>=(?:[^,;{}()]|\([^;{}()]*\))*)?")
_ONE = re.sub(r"\?P<\w+>", "?:", _DECLARATOR)
_WITHOUT_VALUE = re.compile(  # a whole statement: type, and names, perhaps with extents and values
    rf"(?:^|(?<=[;{{}}]))[ \t]*{ALIGNMENT}(?:volatile\s+)?"
    r"(?!(?:return|goto|delete|throw|else|using|typedef|struct|class|union|enum|static|extern|case|new)\b)"
    r"(?P<type>(?:(?:unsigned|signed|long|short)\s+)*[\w:]+(?:\s*<[\w:,\s]*>)?)\s+"
    rf"(?P<names>{_ONE}(?:,\s*{_ONE})*);", re.M)
_FIXED_SIZE = r"u?int(?:8|16|32|64)_t|size_t"
_INTEGER = re.compile(r"(?:(?:unsigned|signed|long|short)\s+)*"
                      rf"(?:unsigned|signed|long|short|int|char|bool|(?:std::)?(?:{_FIXED_SIZE}))$")
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.M)
_ASSERT = re.compile(r"\b(?:static_)?assert\s*\(")   # its message has the text
_KEYWORDS_BEFORE_A_VALUE = {"return", "case", "else", "do", "throw"}
# Those that take their arguments by value
_BY_VALUE = re.compile(
    r"(?:\b(?:if|while|switch|for|return|f?min|f?max|f?abs|printf|__\w+|atomic[A-Z]\w*|make_\w+|int|unsigned|"
    rf"float|double|bool|char|short|long|{_FIXED_SIZE})|\bstatic_cast\s*<[^<>&]*>|[^\w\s>\])])$")
_DECLARED_TYPE = re.compile(
    r"(?:^|[;{}(])\s*(?:const\s+)?[\w:]+(?:\s*<[^;{}()]*>\s*[*&]*|\s*[*&]+)\s*$")
_NOT_EVALUATED = re.compile(r"\b(?:sizeof|alignof|alignas|decltype|typeid|noexcept|__align__)$")


def without_value(code: str) -> Iterator[Edit]:
    """What follows a declaration without a value, and the uses of integers."""
    brackets: Brackets | None = None
    for variables in _WITHOUT_VALUE.finditer(code):
        block = innermost_block(code, variables.start())
        if block < 0:
            continue
        brackets = brackets or Brackets(code)
        said = ""
        for name, extents, value in re.findall(rf"{_DECLARATOR}(?:,|$)", variables["names"]):
            if value:
                continue
            plain = _INTEGER.match(variables["type"]) and not extents and "volatile" not in variables.group()
            uses = _uses(code, brackets, name, variables.end(), brackets.end(block)) if plain else None
            said += f" SIM_POISON({name})" if uses is None else f" SIM_UNWRITTEN({name})"
            yield from uses or ()
        if said:
            yield variables.end(), variables.end(), said


# ------------------------------------------------------------------------------------------ integers
def _uses(code: str, brackets: Brackets, name: str, start: int, end: int) -> list[Edit] | None:
    """How an integer is used in its scope, as edits; None: in a way that they would change or not see."""
    scope = without_gpu_only_code(code[:end])[start:]
    word = re.compile(rf"(?<![\w.])(?<!->)(?<!::){name}\b(?!\s*::)")
    if (end < 0 or re.search(r"^[ \t]*#[ \t]*(?:if|elif)", scope, re.M)       # braces may not match
            or any(word.search(directive.group()) for directive in _DIRECTIVE.finditer(code))
            or re.search(r"\b(?:decltype|__typeof__)\b|\[\s*=", scope)
            or any(word.search(code, *_span(brackets, lambda_.end() - 1))
                   for lambda_ in re.compile(r"(?<![\w\])])\s*\[").finditer(code, start, end))):
        return None
    edits = []
    asserted = [_span(brackets, found.end() - 1) for found in _ASSERT.finditer(code, start, end)]
    for use in word.finditer(scope):
        at, after = start + use.start(), start + use.end()
        if any(first < at < last for first, last in asserted):
            continue
        macro = _use(code, brackets, at, after)
        if macro is None:
            return None
        if macro:
            edits.append((at, after, f"{macro}({name})"))
    return edits


def _span(brackets: Brackets, bracket: int) -> tuple[int, int]:
    return bracket, brackets.end(bracket)


def _use(code: str, brackets: Brackets, at: int, after: int) -> str | None:
    """The macro for a use of an integer; "": none is needed; None: it may be no use, but a declaration."""
    before, rest = code[max(0, at - 200):at].rstrip(), code[after:after + 200].lstrip()
    last, following = before[-1:], rest[:1]
    around = brackets.around(at)
    opening = code[around]
    callee = code[max(0, around - 200):around].rstrip()
    word_before = re.search(r"\b[A-Za-z_]\w*$", before)
    if word_before:
        if word_before.group() == "sizeof":
            return ""
        if word_before.group() not in _KEYWORDS_BEFORE_A_VALUE:
            return None
    declarator = _DECLARED_TYPE.search(before)
    in_list = last == "," and following in tuple(",;=:)")                      # perhaps of declarators
    if (following in ("[", "(", ".", "{") or rest.startswith("->") or (in_list and opening == "{")
            or (declarator and (last == ">" or declarator.group()[0] != "("
                                or re.search(r"(?:\]|\bfor|\bcatch)$", callee)))
            or (opening == "(" and (callee.endswith("]")                       # a lambda's parameters
                or (callee.endswith("for") and in_list)))):
        return None
    if following == "=" and not rest.startswith("=="):
        return "SIM_WRITE"
    if _NOT_EVALUATED.search(callee) and opening == "(":
        return ""
    if last == "&" and not before.endswith("&&") and not re.search(r"[\w\]]\s*&$", before):
        return "SIM_WRITE"                                                     # its address is taken
    if re.search(r"&\s*\w+\s*[=({]$", before):
        return "SIM_WRITE"                                                     # a reference to it
    if opening == "(" and re.search(r"\b__shfl\w*$", callee):
        return "SIM_WRITE"                                                     # perhaps nobody takes it
    assigned = re.match(r"\s*(?:=(?!=)|\+\+|--|[-+*/%&|^]=|<<=|>>=)", code[brackets.end(around) + 1:][:20])
    if opening == "(" and assigned:
        return "SIM_WRITE"                                                     # (a ? x : y) = 1
    argument = last in tuple("(,{") and following in tuple("),}")
    if argument and not (opening == "(" and _BY_VALUE.search(callee)) and opening != "[":
        return "SIM_WRITE"                                                     # perhaps to a reference
    return "SIM_READ"


# ------------------------------------------------------------------------------------------ arrays
_SUBSCRIPTED = re.compile(r"(?<![\w.])(?<!->)(?<!::)(?P<base>(?:\w+\s*::\s*)*[A-Za-z_]\w*(?:\.\w+)*)\s*\[")
_NO_ARRAYS = {"return", "auto", "delete", "operator", "else", "do", "case", "const", "new", "throw", "using",
              "typename", "mutable", "float", "double", "int", "unsigned", "char", "short", "long", "bool"}


def subscripts(source: str, code: str) -> Iterator[Edit]:
    """Of names in functions, where they are values for sure, and no addresses are taken."""
    code = _DIRECTIVE.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), code)
    brackets = Brackets(code)
    asserted = [_span(brackets, found.end() - 1) for found in _ASSERT.finditer(code)]
    in_function: dict[int, bool] = {}
    parts = Parts(code, brackets)
    for found in _SUBSCRIPTED.finditer(code):
        start, opening = found.start(), found.end() - 1
        block = brackets.block(start)
        if block not in in_function:
            in_function[block] = innermost_block(code, block + 1) == block >= 0
        if (not in_function[block] or re.split(r"\W", found["base"])[0] in _NO_ARRAYS
                or any(first < start < last for first, last in asserted)):
            continue
        indices = []
        while code[opening:opening + 1] == "[" and (closing := brackets.end(opening)) >= 0:
            indices.append((opening, closing))
            opening = closing + 1
            while code[opening:opening + 1].isspace():
                opening += 1
        text = code[start:closing]
        if "{" in text or "<" in found["base"] or not all(code[a + 1:b].strip() for a, b in indices):
            continue
        if not _is_value(code, brackets, start, code[closing + 1:closing + 50].lstrip()):
            continue
        for opening, closing in indices:
            base = " ".join(source[start:opening].split())
            if "//" in base or "/*" in base or '"' in base:
                continue
            base = f"({base})" if "," in base else base
            next_part = parts.end(base, opening)
            macro = f"SIM_INDEX_OF_PART({base}, {next_part}, " if next_part else f"SIM_INDEX({base}, "
            yield opening + 1, opening + 1, macro
            yield closing, closing, ")"


def _is_value(code: str, brackets: Brackets, start: int, rest: str) -> bool:
    """True if what starts there, and is followed by `rest`, is a value: not declared, nor after a &."""
    before = code[max(0, start - 200):start].rstrip()
    last, around = before[-1:], brackets.around(start)
    callee = code[max(0, around - 50):around].rstrip()
    if word := re.search(r"\b[A-Za-z_]\w*$", before):
        return word.group() in _KEYWORDS_BEFORE_A_VALUE
    if last == "&":
        return before.endswith("&&") and not rest.startswith(("=", ";", ","))
    if last == "*":                     # a product, or a pointer that is declared
        operand = re.search(r"([^\s\w]|\b(?:return|case|else)\b)?\s*[\w:]*\s*\*$", before)
        return bool(operand and operand[1] and operand[1] not in tuple(";{},>")
                    and not (operand[1] == "(" and re.search(r"(?:\]|\bfor|\bcatch)$", callee)))
    if last == ">":
        return not before.endswith("->") and "<" not in re.split(r"[;{}(,]", before)[-1]
    if last == "<":
        return before.endswith((" <", "<<"))
    if last == ",":
        return code[around] in "([" and not rest.startswith((">", "=")) and not callee.endswith("for")
    if last == "}":
        return not rest.startswith((";", ",", "{")) and not re.match(r"=\s*\{", rest)
    if last == "(":
        return not callee.endswith("&") and not _NOT_EVALUATED.search(callee)
    return True
