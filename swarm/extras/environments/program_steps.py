"""Interpreter for programs in a small part of Python, with counted steps.

Python never executes a program: the interpreter walks its tree, its values are plain data (numbers, texts, lists,
tuples, dicts), and only the methods and functions of `program_functions` exist, so that a program reaches no frame,
file, module or object of this process. Invariant: the result of a program, its errors and its steps depend on its text,
its arguments and Python's grammar alone; every operation is charged at least what it takes before it is done.
"""

import ast
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

from swarm.extras.environments.program_functions import FUNCTIONS, METHODS, sort_values
from swarm.extras.environments.program_values import (
    BREAK,
    CONTINUE,
    DATA,
    MAX_BITS,
    MAX_CHARS,
    MAX_DEPTH,
    MAX_NESTING,
    MAX_SIZE,
    MAX_STEPS,
    Closure,
    NamedFunction,
    NameScope,
    ProgramFailed,
    Returned,
    StepLimit,
)

_RECURSION_LIMIT: Final = 4_000  # above 8 times MAX_DEPTH, so that the count above decides, not the interpreter's
_OPERATORS: Final[Mapping[type, Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_COMPARISONS: Final[Mapping[type, Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


def read_program(text: str) -> ast.Module:
    """Parses a program. Raises ProgramFailed if it is too long, or is not valid Python."""
    if len(text) > MAX_CHARS:
        raise ProgramFailed("MemoryError", 1)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _RECURSION_LIMIT))  # how deep a text may nest is the parser's matter alone
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except SyntaxError as error:
        raise ProgramFailed("SyntaxError", error.lineno or 1) from None
    except (ValueError, RecursionError, MemoryError):
        raise ProgramFailed("SyntaxError", 1) from None
    finally:
        sys.setrecursionlimit(before)


class Run:
    """One run of a program, with its own names, steps and values."""

    def __init__(self, tree: ast.Module, max_steps: int = MAX_STEPS) -> None:
        self._tree = tree
        self._left = max_steps
        self._max_steps = max_steps
        self._depth = 0
        self._line = 1
        self._names = NameScope({}, NameScope({name: NamedFunction(name) for name in FUNCTIONS}))

    @property
    def num_steps(self) -> int:
        """Steps taken so far."""
        return self._max_steps - self._left

    def call(self, name: str, *arguments: object) -> object:
        """Runs the program, then its function `name`, and returns the result.

        Raises:
            ProgramFailed: the program ended with an error, or its steps are used up.
        """
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(max(before, _RECURSION_LIMIT))
        try:
            self._block(self._tree.body, self._names)
            return self.invoke(self._names.get(name), list(arguments), {})
        except StepLimit:
            raise ProgramFailed("TimeoutError", self._line) from None
        except Exception as error:
            raise ProgramFailed(type(error).__name__, self._line) from None
        finally:
            sys.setrecursionlimit(before)

    # --- bounds --------------------------------------------------------------------------------------

    def charge(self, steps: int) -> None:
        """Subtracts steps from those left. Raises StepLimit if too few are left."""
        self._left -= steps
        if self._left < 0:
            self._left = 0
            raise StepLimit

    def weigh(self, *values: object) -> int:
        """Charges for everything that the values hold, and returns the number of steps charged.

        A part that occurs several times is charged as often, since a comparison or a print would meet it as often.

        Raises:
            StepLimit: too few steps are left.
            RecursionError: lists are nested deeper than MAX_NESTING.
        """
        before = self._left
        waiting = [(value, 0) for value in values]
        while waiting:
            value, depth = waiting.pop()
            if isinstance(value, (list, tuple, dict)):
                held = cast("list[object]", value if not isinstance(value, dict) else [*value, *value.values()])
                self.charge(1 + len(held))
                if depth >= MAX_NESTING:
                    raise RecursionError
                waiting += [(each, depth + 1) for each in held]
            elif isinstance(value, str):
                self.charge(1 + len(value) // 16)
            else:  # equal hashes of large numbers are easily made
                self.charge(20 if isinstance(value, int) and value.bit_length() > 60 else 1)
        return before - self._left

    def _sized(self, value: Any) -> Any:
        """Charges for a value and returns it. Raises MemoryError, OverflowError or TypeError beyond the bounds."""
        if isinstance(value, (str, list, tuple, dict)):
            size = len(cast("str", value))
            self.charge(size // 8)
            if size > MAX_SIZE:
                raise MemoryError
        elif isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise OverflowError
        elif isinstance(value, complex) or not isinstance(value, (*DATA, Closure, NamedFunction)):
            raise TypeError
        return value

    def items(self, value: Any) -> list[Any]:
        """Charges for the items of an iterable value and returns them. Raises TypeError, MemoryError or StepLimit."""
        if not isinstance(value, (str, list, tuple, dict, range)):
            raise TypeError
        if isinstance(value, range) and (value.stop - value.start) // value.step > MAX_SIZE:
            raise MemoryError
        self.charge(len(cast("str", value)) + 1)
        return list(cast("Iterable[Any]", value))

    # --- statements ----------------------------------------------------------------------------------

    def _block(self, statements: list[ast.stmt], scope: NameScope) -> object:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise RecursionError
        for statement in statements:
            self.charge(1)
            self._line = statement.lineno
            signal = self._statement(statement, scope)
            if signal is not None:
                self._depth -= 1
                return signal
        self._depth -= 1
        return None

    def _statement(self, node: ast.stmt, scope: NameScope) -> object:
        match node:
            case ast.Expr(value=value):
                self._value(value, scope)
            case ast.Assign(targets=targets, value=value):
                made = self._value(value, scope)
                for target in targets:
                    self._assign(target, made, scope)
            case ast.AnnAssign(target=target, value=value):
                if value is not None:
                    self._assign(target, self._value(value, scope), scope)
            case ast.AugAssign(target=target, op=sign, value=value):
                read = ast.copy_location(_as_read(target), target)
                one, other = self._value(read, scope), self._value(value, scope)
                if isinstance(sign, ast.Add) and isinstance(one, list):
                    cast("list[Any]", one).extend(self.items(other))  # the same list, as in Python
                    self._sized(one)
                else:
                    one = self._combine(sign, one, other)
                self._assign(target, one, scope)
            case ast.If(test=test, body=body, orelse=orelse):
                return self._block(body if self._value(test, scope) else orelse, scope)
            case ast.While():
                return self._while(node, scope)
            case ast.For():
                return self._for(node, scope)
            case ast.Return(value=value):
                return Returned(None if value is None else self._value(value, scope))
            case ast.FunctionDef(name=name, args=arguments, body=body, decorator_list=[]):
                scope.names[name] = self._function(arguments, body, scope)
            case ast.Pass():
                pass
            case ast.Break():
                return BREAK
            case ast.Continue():
                return CONTINUE
            case ast.Assert(test=test):
                if not self._value(test, scope):
                    raise AssertionError
            case _:
                raise NotImplementedError
        return None

    def _while(self, node: ast.While, scope: NameScope) -> object:
        while self._value(node.test, scope):
            self.charge(1)
            signal = self._block(node.body, scope)
            if signal is BREAK:
                return None
            if isinstance(signal, Returned):
                return signal
        return self._block(node.orelse, scope)

    def _for(self, node: ast.For, scope: NameScope) -> object:
        values = self._value(node.iter, scope)
        if not isinstance(values, (str, list, tuple, dict, range)):
            raise TypeError
        for item in cast("Iterable[Any]", values):
            self.charge(1)
            self._assign(node.target, item, scope)
            signal = self._block(node.body, scope)
            if signal is BREAK:
                return None
            if isinstance(signal, Returned):
                return signal
        return self._block(node.orelse, scope)

    def _assign(self, target: ast.expr, value: Any, scope: NameScope) -> None:
        match target:
            case ast.Name(id=name):
                scope.names[name] = value
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                values = self.items(value)
                if len(values) != len(parts):
                    raise ValueError
                for part, each in zip(parts, values, strict=True):
                    self._assign(part, each, scope)
            case ast.Subscript(value=holder, slice=index) if not isinstance(index, ast.Slice):
                held, key = self._value(holder, scope), self._value(index, scope)
                if not isinstance(held, (list, dict)):
                    raise TypeError
                self.weigh(key)
                cast("dict[Any, Any]", held)[key] = value
            case _:
                raise NotImplementedError

    # --- expressions ---------------------------------------------------------------------------------

    def _value(self, node: ast.expr, scope: NameScope) -> Any:
        self.charge(1)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise RecursionError
        value = self._expression(node, scope)
        self._depth -= 1
        return value

    def _expression(self, node: ast.expr, scope: NameScope) -> Any:
        match node:
            case ast.Name(id=name):
                return scope.get(name)
            case ast.Constant(value=value):
                if isinstance(value, (bytes, complex)) or value is ...:
                    raise NotImplementedError
                return self._sized(value)
            case ast.BinOp(left=left, op=sign, right=right):
                return self._combine(sign, self._value(left, scope), self._value(right, scope))
            case ast.Call():
                return self._call(node, scope)
            case ast.Compare(left=left, ops=signs, comparators=others):
                return self._compare(left, signs, others, scope)
            case ast.Subscript(value=holder, slice=index):
                return self._subscript(self._value(holder, scope), index, scope)
            case ast.BoolOp(op=sign, values=parts):
                value: Any = None
                for part in parts:
                    value = self._value(part, scope)
                    if bool(value) is isinstance(sign, ast.Or):
                        break
                return value
            case ast.UnaryOp(op=sign, operand=operand):
                return self._unary(sign, self._value(operand, scope))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._value(body if self._value(test, scope) else orelse, scope)
            case ast.List(elts=parts):
                return [self._value(part, scope) for part in parts]
            case ast.Tuple(elts=parts):
                return tuple([self._value(part, scope) for part in parts])
            case ast.Dict(keys=keys, values=values):
                pairs = [
                    (self._value(_given(key), scope), self._value(each, scope))
                    for key, each in zip(keys, values, strict=True)
                ]
                self.weigh(*(key for key, _ in pairs))
                return dict(pairs)
            case ast.ListComp(elt=part, generators=loops) | ast.GeneratorExp(elt=part, generators=loops):
                made: list[Any] = []
                self._comprehend(loops, NameScope({}, scope), lambda inner: made.append(self._value(part, inner)))
                return self._sized(made)
            case ast.DictComp(key=key, value=part, generators=loops):
                pairs = []
                self._comprehend(
                    loops,
                    NameScope({}, scope),
                    lambda inner: pairs.append((self._value(key, inner), self._value(part, inner))),
                )
                self.weigh(*(each for each, _ in pairs))
                return dict(pairs)
            case ast.Lambda(args=arguments, body=body):
                return self._function(arguments, body, scope)
            case ast.JoinedStr(values=parts):
                return self._sized("".join([self.text(self._value(_plain(part), scope)) for part in parts]))
            case _:
                raise NotImplementedError

    def _comprehend(self, loops: list[ast.comprehension], scope: NameScope, add: Callable[[NameScope], None]) -> None:
        loop, *inner = loops
        for item in self.items(self._value(loop.iter, scope)):
            self.charge(1)
            self._assign(loop.target, item, scope)
            if all(self._value(test, scope) for test in loop.ifs):
                if inner:
                    self._comprehend(inner, scope, add)
                else:
                    add(scope)

    def _combine(self, sign: ast.operator, one: Any, other: Any) -> Any:
        if type(sign) not in _OPERATORS:
            raise NotImplementedError
        are_numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
        match sign:
            case ast.Mult() if not are_numbers:
                many, times = (one, other) if isinstance(other, int) else (other, one)
                if not isinstance(many, (str, list, tuple)) or not isinstance(times, int):
                    raise TypeError
                if len(cast("str", many)) * max(times, 0) > MAX_SIZE:
                    raise MemoryError
                self.charge(len(cast("str", many)) * max(times, 0))
            case ast.Add() if not are_numbers:
                if type(one) is not type(other) or not isinstance(one, (str, list, tuple)):
                    raise TypeError
                self.charge((len(cast("str", one)) + len(cast("str", other))) // 4)
            case ast.Pow() if isinstance(one, int) and isinstance(other, int):
                if other > MAX_BITS or one.bit_length() * abs(other) > MAX_BITS:
                    raise OverflowError
            case _ if not are_numbers:  # the format operator, too
                raise TypeError
            case _:
                pass
        return self._sized(_apply(_OPERATORS, sign, one, other))

    def _unary(self, sign: ast.unaryop, value: Any) -> Any:
        if isinstance(sign, ast.Not):
            return not value
        if isinstance(sign, ast.USub):
            return -value
        if isinstance(sign, ast.UAdd):
            return +value
        raise NotImplementedError

    def _compare(self, left: ast.expr, signs: list[ast.cmpop], others: list[ast.expr], scope: NameScope) -> bool:
        one = self._value(left, scope)
        for sign, part in zip(signs, others, strict=True):
            other = self._value(part, scope)
            if isinstance(sign, (ast.In, ast.NotIn)) and isinstance(other, range) and not isinstance(one, int):
                raise TypeError  # it would be looked for item by item
            if isinstance(sign, (ast.Is, ast.IsNot)) and not any(
                each is None or isinstance(each, bool) for each in (one, other)
            ):
                raise TypeError  # which numbers are one object is CPython's matter
            self.weigh(one, other)
            if not _apply(_COMPARISONS, sign, one, other):
                return False
            one = other
        return True

    def _subscript(self, held: Any, index: ast.expr, scope: NameScope) -> Any:
        if not isinstance(held, (str, list, tuple, dict, range)):
            raise TypeError
        if isinstance(index, ast.Slice):
            bounds = [
                None if part is None else self._value(part, scope) for part in (index.lower, index.upper, index.step)
            ]
            if isinstance(held, dict):
                raise TypeError
            self.charge(min(len(held), MAX_SIZE) // 4)
            return self._sized(held[slice(*bounds)])
        key = self._value(index, scope)
        self.weigh(key)
        return held[key]

    def text(self, value: Any) -> str:
        """Charges for a value and returns it as `str` writes it. Raises TypeError for a function."""
        if isinstance(value, (Closure, NamedFunction)):
            raise TypeError
        self.weigh(value)
        return str(value)

    # --- calls ---------------------------------------------------------------------------------------

    def _function(self, arguments: ast.arguments, body: list[ast.stmt] | ast.expr, scope: NameScope) -> Closure:
        if arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg or arguments.kwarg:
            raise NotImplementedError
        defaults = [self._value(each, scope) for each in arguments.defaults]
        return Closure([each.arg for each in arguments.args], defaults, body, scope)

    def _call(self, node: ast.Call, scope: NameScope) -> Any:
        if isinstance(node.func, ast.Attribute):
            holder, method = self._value(node.func.value, scope), node.func.attr
            given, named = self._arguments(node, scope)
            return self._method(holder, method, given, named)
        function = self._value(node.func, scope)
        given, named = self._arguments(node, scope)
        return self.invoke(function, given, named)

    def _arguments(self, node: ast.Call, scope: NameScope) -> tuple[list[Any], dict[str, Any]]:
        if any(isinstance(each, ast.Starred) for each in node.args) or any(each.arg is None for each in node.keywords):
            raise NotImplementedError
        named = {str(each.arg): self._value(each.value, scope) for each in node.keywords}
        return [self._value(each, scope) for each in node.args], named

    def invoke(self, function: Any, given: list[Any], named: dict[str, Any]) -> Any:
        """Calls a function of the program, or a built-in one, and returns its result.

        Raises TypeError for any other value or for wrong arguments, and whatever the function raises.
        """
        self.charge(1)
        if isinstance(function, NamedFunction):
            return self._sized(FUNCTIONS[function.name](self, given, named))
        if not isinstance(function, Closure):
            raise TypeError
        names = dict(
            zip(
                function.parameters[len(function.parameters) - len(function.defaults) :], function.defaults, strict=True
            )
        )
        names.update(zip(function.parameters, given, strict=False))
        names.update(named)
        if len(given) > len(function.parameters) or set(names) != set(function.parameters):
            raise TypeError
        scope, line = NameScope(names, function.scope), self._line
        if isinstance(function.body, ast.expr):
            return self._value(function.body, scope)
        signal = self._block(function.body, scope)
        self._line = line
        return signal.value if isinstance(signal, Returned) else None

    def _method(self, holder: Any, name: str, given: list[Any], named: dict[str, Any]) -> Any:
        kind = next((kind for kind in METHODS if type(holder) is kind), None)
        if kind is None or name not in METHODS[kind]:
            raise AttributeError(name)
        if any(isinstance(each, (Closure, NamedFunction)) for each in given) and name not in ("append", "insert"):
            raise TypeError
        if kind is list and name == "sort":
            holder[:] = sort_values(self, [holder], named)
            return None
        if named:
            raise TypeError
        if name not in ("append", "pop", "get"):  # which look at no item
            self.weigh(holder)
        self.weigh(*(given if name != "append" else ()))
        if kind is str and name.endswith("strip") and given and isinstance(given[0], str):
            self.charge(len(holder) * len(given[0]) // 64)  # each letter is looked for among those given
        if kind is str and name == "replace":
            old, new = given  # a third argument is not supported
            if (holder.count(old) if old else len(holder) + 1) * len(new) > MAX_SIZE:
                raise MemoryError
        if kind is str and name == "join":
            given = [self.items(given[0])]
            if sum(map(len, given[0])) + len(holder) * len(given[0]) > MAX_SIZE:
                raise MemoryError
        if kind is list and name == "extend":
            given = [self.items(given[0])]
        made = getattr(holder, name)(*given)
        if len(holder) > MAX_SIZE:
            raise MemoryError
        if kind is dict and name in ("keys", "values", "items"):
            made = list(made)
        return self._sized(made)


def _apply(table: Mapping[type, Callable[[Any, Any], Any]], sign: ast.AST, one: Any, other: Any) -> Any:
    return table[type(sign)](one, other)


def _given(key: ast.expr | None) -> ast.expr:
    if key is None:  # of another dict that is spread
        raise NotImplementedError
    return key


def _plain(part: ast.expr) -> ast.expr:
    """The value of a part of an f-string. Raises NotImplementedError for a width or a conversion."""
    if isinstance(part, ast.FormattedValue):
        if part.format_spec is not None or part.conversion != -1:
            raise NotImplementedError
        return part.value
    return part


def _as_read(target: ast.expr) -> ast.expr:
    match target:
        case ast.Name(id=name):
            return ast.Name(id=name, ctx=ast.Load())
        case ast.Subscript(value=value, slice=index):
            return ast.Subscript(value=value, slice=index, ctx=ast.Load())
        case _:
            raise NotImplementedError
