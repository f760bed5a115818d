"""The arithmetic of stage headers: tile rules, limits, bytes.

Numbers, names, tuples, + - * / // % ** <<, comparisons (chained, too), `in`, and / or / not, `a if c else b`,
min, max, ceil_div(a, b), next_power_of_2(a) and divisor(a, most). Python's own parser reads them; what they
mean is here. A header may come with a file from anywhere, so sizes are bounded: of the text, of numbers, of
nesting.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping

LONGEST = 1000        # characters
DEEPEST = 50          # levels of nesting
MOST_DIVIDED = 2**16
LARGEST = 2**80       # numbers are below: bytes of HBM traffic are below 2^64

Value = int | float | bool | tuple
Term = Callable[[Mapping[str, Value]], Value]  # an expression, ready to be given values of its names


class ArithmeticProblem(ValueError):
    """An expression that is none, or has no value."""


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(a: int) -> int:
    """The least power of 2 that is not below a."""
    return 1 << max(a - 1, 0).bit_length()


def divisor(a: int, most: int) -> int:
    """The greatest divisor of a that is not above `most`, or 1."""
    if not 0 < a <= MOST_DIVIDED:
        raise ArithmeticProblem(f"divisor() takes numbers from 1 to {MOST_DIVIDED}, not {a}")
    return next(n for n in range(max(1, min(a, most)), 0, -1) if a % n == 0)


FUNCTIONS: dict[str, Callable[..., Value]] = {
    "min": min, "max": max, "ceil_div": ceil_div, "next_power_of_2": next_power_of_2, "divisor": divisor}


def _power(a: Value, b: Value) -> Value:
    if not isinstance(b, int) or not 0 <= b <= 80:
        raise ArithmeticProblem(f"an exponent must be an integer from 0 to 80, not {b}")
    return operator.pow(a, b)


def _shift(a: Value, b: Value) -> Value:
    if not isinstance(b, int) or not 0 <= b <= 80:
        raise ArithmeticProblem(f"a shift must be by an integer from 0 to 80, not {b}")
    return operator.lshift(a, b)


BINARY: dict[type, Callable[[Value, Value], Value]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power, ast.LShift: _shift}
UNARY: dict[type, Callable[..., Value]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_}
COMPARISONS: dict[type, Callable[..., bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b}


def evaluate(expression: str, **names: Value) -> Value:
    """The value of an expression in these names.

    Raises:
        ArithmeticProblem: if it is not arithmetic, or has no value, as with a division by zero.
    """
    try:
        return _parsed(expression)(names)
    except ArithmeticProblem as error:
        raise ArithmeticProblem(f"{expression.strip()!r}: {error}") from None
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ArithmeticProblem(f"{expression.strip()!r}: {error}") from None


@functools.lru_cache(1024)
def _parsed(expression: str) -> Term:
    if len(expression) > LONGEST:
        raise ArithmeticProblem(f"it has {len(expression)} characters; at most {LONGEST} are read")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ArithmeticProblem(getattr(error, "msg", None) or "nested too deeply") from None
    return _term(tree.body, DEEPEST)


def _term(node: ast.expr, depth: int) -> Term:
    """What a node of the tree means."""
    if not depth:
        raise ArithmeticProblem(f"nested more than {DEEPEST} levels deep")
    within = functools.partial(_term, depth=depth - 1)
    match node:
        case ast.Constant(value=int() | float() as number):
            constant = _bounded(number)
            return lambda names: constant
        case ast.Name():
            return functools.partial(_named, node.id)
        case ast.Tuple():
            terms = [within(x) for x in node.elts]
            return lambda names: tuple(x(names) for x in terms)
        case ast.UnaryOp() if type(node.op) in UNARY:
            of, term = UNARY[type(node.op)], within(node.operand)
            return lambda names: of(term(names))
        case ast.BinOp() if type(node.op) in BINARY:
            both, left, right = BINARY[type(node.op)], within(node.left), within(node.right)
            return lambda names: _bounded(both(_number(left(names)), _number(right(names))))
        case ast.BoolOp():
            terms = [within(x) for x in node.values]
            if isinstance(node.op, ast.And):
                return lambda names: all(x(names) for x in terms)
            return lambda names: any(x(names) for x in terms)
        case ast.Compare() if all(type(op) in COMPARISONS for op in node.ops):
            compared = [within(x) for x in (node.left, *node.comparators)]
            return functools.partial(_chain, [COMPARISONS[type(op)] for op in node.ops], compared)
        case ast.IfExp():
            condition, then, other = within(node.test), within(node.body), within(node.orelse)
            return lambda names: then(names) if condition(names) else other(names)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
            function, arguments = FUNCTIONS[name], [within(x) for x in node.args]
            return lambda names: _bounded(function(*(_number(x(names)) for x in arguments)))
    raise ArithmeticProblem(f"{_text(node)} is no arithmetic: there are + - * / // % ** <<, "
                            f"comparisons, in, and, or, not, if-else, {', '.join(FUNCTIONS)}")


def _text(node: ast.expr) -> str:
    try:
        return ast.unparse(node)
    except RecursionError:  # a chain such as a.b.b.b..., whose levels nobody has counted
        return "so long a chain"


def _named(name: str, names: Mapping[str, Value]) -> Value:
    if name not in names:
        raise ArithmeticProblem(f"{name} is not known here; {', '.join(names)} are")
    return names[name]


def _chain(operators: list[Callable], terms: list[Term], names: Mapping[str, Value]) -> bool:
    left = terms[0](names)
    for compare, term in zip(operators, terms[1:]):
        right = term(names)
        if not compare(left, right):
            return False
        left = right
    return True


def _number(value: Value) -> Value:
    if isinstance(value, tuple):
        raise ArithmeticProblem(f"{value} is no number")
    return value


def _bounded(value: Value) -> Value:
    if isinstance(value, (int, float)) and not abs(value) <= LARGEST:
        raise ArithmeticProblem(f"a number is above 2^{LARGEST.bit_length() - 1}")
    return value
