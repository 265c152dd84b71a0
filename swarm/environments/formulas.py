"""Formulas in answers: recognition of short arithmetic, its exact value, and a check of integrals.

Invariant: time is linear in the length of the text, and no answer can make a computation large: exact arithmetic has no
powers, and the check of integrals bounds nested powers and stops at an intermediate value beyond 1e25.
"""

import ast
import importlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, Final, cast

_TOKEN: Final = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,12})?|(?P<word>[A-Za-z]+)|\*\*|[-+*/() ]")
_MAX_TOKENS: Final = 200
_SMALL_POWER: Final = re.compile(r"\*\*(?:[0-9]{1,2}(?![0-9.])|\([0-9]{1,2}/[0-9]{1,2}\))(?!\*\*)")
_DECIMAL: Final = re.compile(r"([0-9]+)\.([0-9]+)")
_MAX_DEGREE: Final = 200.0
# Numbers have at most 12 decimals, and intermediate values are 0 or from _LEAST to _MOST: different formulas differ by
# more than the rounding of _DIGITS digits, equal formulas by less than _SAME.
_LEAST, _MOST, _SAME, _DIGITS = 1e-12, 1e25, 1e-45, 60
_POINTS: Final = ((0.61, 0.07), (1.31, -0.03))  # complex, away from poles and branch points of ordinary formulas
_CONSTANT: Final = (0.83, -0.59)  # of integration

FUNCTIONS: Final = frozenset({"sin", "cos", "tan", "exp", "log", "sqrt", "asin", "acos", "atan"})


def is_formula(answer: str) -> bool:
    """True for short arithmetic over numbers, one-letter symbols and common functions, with small exponents.

    Without other names, attributes and large powers, an answer can neither run code in sympy's parser nor keep it busy.
    """
    at = num_tokens = 0
    while at < len(answer):  # token by token: one pattern for all of it took exponential time over a long word
        token = _TOKEN.match(answer, at)
        num_tokens += 1
        if token is None or num_tokens > _MAX_TOKENS:
            return False
        word = token["word"]
        if word and len(word) > 1 and word not in FUNCTIONS:
            return False
        at = token.end()
    compact = answer.replace(" ", "")
    has_product_without_sign = re.search(r"[0-9][A-Za-z]", compact)
    return bool(compact) and not has_product_without_sign and len(_SMALL_POWER.findall(compact)) == compact.count("**")


def exact_value(answer: str) -> tuple[Fraction, list[int]] | None:
    """Value of an expression over whole numbers with + - * / and brackets, and its numbers in ascending order.

    None for any other text, and for a division by zero.
    """
    tree = _parse(answer) if is_formula(answer) and "." not in answer else None
    if tree is None:
        return None
    numbers: list[int] = []
    with suppress(ZeroDivisionError, _NotArithmetic):
        return _exact(tree, numbers), sorted(numbers)
    return None


def is_integral(answer: str, integrand: str, variable: str) -> bool:
    """True if the derivative of `answer` by `variable` equals the integrand at two complex points, within _SAME.

    C is a constant. False beyond the bounds above. sympy's `simplify` needs no bounds, but may take seconds.
    """
    if not is_formula(answer):
        return False
    tree, wanted = _parse(answer), _parse(integrand)
    if tree is None or wanted is None:
        return False
    context = _context()
    try:
        for point in _POINTS:
            one = context.mpf(1)
            symbols = {
                variable: _term_of(context.mpc(*point), one, 1.0),
                "C": _term_of(context.mpc(*_CONSTANT), 0, 1.0),
            }
            value = _term(wanted, symbols, context).value
            if not abs(_term(tree, symbols, context).derivative - value) <= _SAME * (1 + abs(value)):
                return False
    except (_NotArithmetic, ArithmeticError, ValueError):
        return False
    return True


@cache
def _context() -> Any:
    context = cast(
        "Any", importlib.import_module("mpmath")
    ).mp.clone()  # comes with sympy, which comes with reasoning-gym
    context.dps = _DIGITS
    return context


class _NotArithmetic(Exception):
    pass


def _parse(text: str) -> ast.expr | None:
    with suppress(SyntaxError, ValueError, MemoryError, RecursionError):
        exact = _DECIMAL.sub(lambda m: f"({int(m[1] + m[2])}/{10 ** len(m[2])})", text.strip())
        return ast.parse(exact, mode="eval").body
    return None


def _exact(node: ast.expr, numbers: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(value)):
            numbers.append(value)
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_exact(operand, numbers)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _exact(operand, numbers)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() as sign, right=right):
            one, other = _exact(left, numbers), _exact(right, numbers)
            match sign:
                case ast.Add():
                    return one + other
                case ast.Sub():
                    return one - other
                case ast.Mult():
                    return one * other
                case _:
                    return one / other
        case _:
            raise _NotArithmetic


@dataclass(frozen=True, slots=True)
class _Term:
    """Value and derivative of a term at a point, and its degree, which bounds nested powers."""

    value: Any  # complex, of mpmath; this and the next
    derivative: Any
    degree: float


def _term_of(value: Any, derivative: Any, degree: float) -> _Term:
    size, slope = abs(value), abs(derivative)
    if not (size <= _MOST and slope <= _MOST and degree <= _MAX_DEGREE) or 0 < size < _LEAST or 0 < slope < _LEAST:
        raise _NotArithmetic
    return _Term(value, derivative, degree)


def _term(node: ast.expr, symbols: Mapping[str, _Term], context: Any) -> _Term:
    match node:
        case ast.Constant(value=int(value)):
            return _term_of(context.mpf(value), 0, 1.0)
        case ast.Name(id=name) if name in symbols:
            return symbols[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            inner = _term(operand, symbols, context)
            return inner if isinstance(sign, ast.UAdd) else _Term(-inner.value, -inner.derivative, inner.degree)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            inner = _term(argument, symbols, context)
            value, slope = _function(name, inner.value, context)
            return _term_of(value, slope * inner.derivative, inner.degree + 1)
        case ast.BinOp(left=left, op=sign, right=right):
            return _binary(sign, _term(left, symbols, context), _term(right, symbols, context))
        case _:
            raise _NotArithmetic


def _function(name: str, at: Any, context: Any) -> tuple[Any, Any]:
    """Value and derivative of a function at a point."""
    value = getattr(context, name)(at)
    match name:
        case "sin":
            return value, context.cos(at)
        case "cos":
            return value, -context.sin(at)
        case "tan":
            return value, 1 + value**2
        case "exp":
            return value, value
        case "log":
            return value, 1 / at
        case "sqrt":
            return value, 1 / (2 * value)
        case "atan":
            return value, 1 / (1 + at**2)
        case _:
            return value, (1 if name == "asin" else -1) / context.sqrt(1 - at**2)


def _binary(sign: ast.operator, one: _Term, other: _Term) -> _Term:
    match sign:
        case ast.Add():
            return _term_of(one.value + other.value, one.derivative + other.derivative, max(one.degree, other.degree))
        case ast.Sub():
            return _term_of(one.value - other.value, one.derivative - other.derivative, max(one.degree, other.degree))
        case ast.Mult():
            slope = one.derivative * other.value + one.value * other.derivative
            return _term_of(one.value * other.value, slope, one.degree + other.degree)
        case ast.Div():
            slope = (one.derivative - one.value / other.value * other.derivative) / other.value
            return _term_of(one.value / other.value, slope, one.degree + other.degree)
        case ast.Pow() if not other.derivative:
            degree = one.degree * max(1.0, float(abs(other.value)))
            if degree > _MAX_DEGREE:
                raise _NotArithmetic
            slope = other.value * one.value ** (other.value - 1) * one.derivative
            return _term_of(one.value**other.value, slope, degree)
        case _:
            raise _NotArithmetic
