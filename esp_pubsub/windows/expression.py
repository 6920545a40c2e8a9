"""A SAS expression over the fields of an event, compiled to a Python function. Pure.

    cost = Expression("price * quantity").bind(schema)
    cost((17, "IBM", 101.5, 200))    # 20300.0

The text is read by `syntax.py`; what it says is checked against the schema's types; the function is made of Python's
syntax nodes that are listed here and of nothing else, so no text ever reaches `eval`.

Null: an operator or a function with a null operand gives null, also a comparison; `isnull` tells. `and` and `or` know
three values: `false and null` is false, `true or null` is true. A condition that is null is not met. Dividing by zero
gives null, and so does an integer that leaves 64 bits.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from esp_pubsub import ExpressionError, FieldType, Schema

from . import functions
from .functions import BOOLEAN, CHANCES, CLOCKS, FUNCTIONS, INTEGER, REAL, STRING, Function
from .syntax import Binary, Call, Constant, If, Logic, Name, Node, Program, Return, Statement, Unary, parse, refuse

Row = Sequence[Any]

NULL, MONEY = "null", "money"
_NUMBERS = (BOOLEAN, INTEGER, REAL, MONEY)
_KINDS = {
    FieldType.INT32: INTEGER,
    FieldType.INT64: INTEGER,
    FieldType.DOUBLE: REAL,
    FieldType.STRING: STRING,
    FieldType.RSTRING: STRING,
}  # of all other types, the kind is the type's name
_ORDERED = (str(FieldType.DATE), str(FieldType.STAMP))
_RANGE = {FieldType.INT32: 1 << 31, FieldType.INT64: 1 << 63}
_HELPERS = {
    **{f"_call_{name}": function.call for name, function in FUNCTIONS.items()},
    "_quotient": functions.quotient,
    "_remainder": functions.remainder,
    "_integer": functions.integer,
    "_float": float,
    "_str": str,
}


@dataclass(frozen=True)
class Expression:
    """An expression of this text. With `into` its value is turned into one of that field type, if that can be done.
    With `bool` it is a condition, which null does not meet.

    ExpressionError (`.text`, `.at`) if the text is not of the language; what does not fit the schema shows in `bind`.
    """

    text: str
    into: FieldType | type[bool] | None = None
    program: Program = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "program", parse(self.text))

    def bind(self, schema: Schema) -> Callable[[Row], Any]:
        """The function that computes it from a row of this schema."""
        try:
            return _Compiler(self.text, schema).function(self.program, self.into)
        except ExpressionError as e:
            e.into = self.into
            raise


class _Value(NamedTuple):
    """What computes a value, of which kind it is, and whether it may be null."""

    kind: str
    code: ast.expr
    nullable: bool = True


class _Compiler:
    """One expression over one schema, as a function of a row."""

    def __init__(self, text: str, schema: Schema) -> None:
        self._text = text
        self._schema = schema
        self._names = 0

    def function(self, program: Program, into: FieldType | type[bool] | None) -> Callable[[Row], Any]:
        returned = [self._value(each.value) for each in _returns(program)]
        kind = self._common(program, [each.kind for each in returned])
        self._check_into(program, kind, into)
        body = [self._statement(each, kind, into) for each in program] + [ast.Return(_constant(None))]
        module = ast.parse("def expression(row): pass")  # all of the node that this Python wants
        made = module.body[0]
        assert isinstance(made, ast.FunctionDef)
        made.body = body
        ast.fix_missing_locations(module)
        namespace: dict[str, Any] = {**_HELPERS, "__builtins__": {}}
        exec(compile(module, "<expression>", "exec"), namespace)
        compiled: Callable[[Row], Any] = namespace["expression"]
        return compiled

    # statements

    def _statement(self, statement: Statement, kind: str, into: FieldType | type[bool] | None) -> ast.stmt:
        if isinstance(statement, Return):
            value = self._value(statement.value)
            if kind == REAL and value.kind != NULL:
                value = self._real(value)
            return ast.Return(self._converted(value, into).code)
        condition = self._truth(statement.condition)
        otherwise = [] if statement.otherwise is None else [self._statement(statement.otherwise, kind, into)]
        met = _is(condition.code, True) if condition.nullable else condition.code
        return ast.If(met, [self._statement(statement.then, kind, into)], otherwise)

    def _common(self, program: Program, kinds: Sequence[str]) -> str:
        """One kind for all that is returned."""
        found = {kind for kind in kinds if kind != NULL}
        if len(found) <= 1:
            return found.pop() if found else NULL
        if found <= set(_NUMBERS):
            return REAL if found & {REAL, MONEY} else INTEGER
        refuse(self._text, program[0].at, f"this returns values of different types: {', '.join(sorted(found))}")

    def _check_into(self, program: Program, kind: str, into: FieldType | type[bool] | None) -> None:
        if into is None or kind == NULL:
            return
        if into is bool:
            if kind not in _NUMBERS:
                refuse(self._text, program[0].at, f"a condition is a boolean or a number, not a value of type {kind}")
            return
        assert isinstance(into, FieldType)
        wanted = _KINDS.get(into)
        if kind == (wanted or str(into)):
            return
        if wanted in (INTEGER, REAL) and kind in _NUMBERS:
            return
        if (wanted == STRING and kind == INTEGER) or (into is FieldType.MONEY and kind == INTEGER):
            return
        refuse(self._text, program[0].at, f"the value is of type {kind}, which a field of type {into} does not take")

    def _converted(self, value: _Value, into: FieldType | type[bool] | None) -> _Value:
        if into is bool:
            met = self._truth_of(value)
            return met._replace(code=_is(met.code, True) if met.nullable else met.code, nullable=False)
        if not isinstance(into, FieldType) or value.kind in (NULL, str(into)):
            return value
        wanted = _KINDS.get(into)
        if wanted == REAL:
            return self._real(value)
        if wanted == STRING and value.kind == INTEGER:
            return self._combined([value], STRING, lambda one: _called("_str", one))
        if wanted == INTEGER:
            return self._in_range(self._whole(value), _RANGE[into])
        return value

    def _whole(self, value: _Value) -> _Value:
        if value.kind == INTEGER:
            return value
        if value.kind == BOOLEAN:
            return self._combined([value], INTEGER, lambda one: ast.BinOp(one, ast.Add(), _constant(0)))
        return self._combined([self._real(value)], INTEGER, lambda one: _called("_integer", one), may_be_null=True)

    # values

    def _value(self, node: Node) -> _Value:
        match node:
            case Constant(value=value):
                return _Value(_kind_of(value), _constant(value), value is None)
            case Name():
                return self._field(node)
            case Call():
                return self._call(node)
            case Unary(operator="-"):
                return self._negative(node)
            case Unary():
                return self._combined([self._truth(node.operand)], BOOLEAN, lambda one: ast.UnaryOp(ast.Not(), one))
            case Logic():
                return self._logic(node)
            case Binary(operator="&"):
                return self._joined(node)
            case Binary(operator="+" | "-" | "*" | "/" | "%"):
                return self._arithmetic(node)
            case Binary():
                return self._compared(node)

    def _field(self, node: Name) -> _Value:
        if node.name not in self._schema.names:
            self._refuse_name(node)
        at = self._schema.names.index(node.name)
        found = self._schema.fields[at]
        code = ast.Subscript(ast.Name("row", ast.Load()), _constant(at), ast.Load())
        return _Value(_KINDS.get(found.type, str(found.type)), code, nullable=not found.key)

    def _refuse_name(self, node: Name) -> NoReturn:
        if node.name.upper() in ("ESP_OPCODE", "ESP_FLAGS"):
            why = "an expression sees the fields of an event, not its opcode and flags; write this window in Python"
        else:
            near = difflib.get_close_matches(node.name, self._schema.names, n=1, cutoff=0.7) or [
                name for name in self._schema.names if name.lower() == node.name.lower()
            ]
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(self._schema.names[:12])}"
            why = f"there is no field {node.name}; {hint}"
        refuse(self._text, node.at, why)

    def _call(self, node: Call) -> _Value:
        if node.name == "isnull":
            if len(node.arguments) != 1:
                refuse(self._text, node.at, "isnull takes one argument")
            value = self._value(node.arguments[0])
            return _Value(BOOLEAN, _is(value.code, None) if value.nullable else _constant(False), nullable=False)
        function = FUNCTIONS.get(node.name)
        if function is None:
            self._refuse_function(node)
        most = len(function.takes)
        if not most - function.optional <= len(node.arguments) <= most:
            takes = " or ".join(str(count) for count in range(most - function.optional, most + 1))
            refuse(self._text, node.at, f"{node.name} takes {takes} arguments, not {len(node.arguments)}")
        return self._called(node, function)

    def _called(self, node: Call, function: Function) -> _Value:
        arguments = []
        for number, (kind, argument) in enumerate(zip(function.takes, node.arguments, strict=False), 1):
            value = self._value(argument)
            fits = value.kind == kind or (kind == REAL and value.kind in _NUMBERS)
            if not fits and not (kind == INTEGER and value.kind == BOOLEAN):
                what = f"argument {number} of {node.name} is of type {kind}, not {value.kind}"
                refuse(self._text, argument.at, what)
            arguments.append(self._real(value) if kind == REAL else value)
        helper, may_be_null = f"_call_{node.name}", function.may_be_null
        return self._combined(
            arguments, function.gives, lambda *given: _called(helper, *given), may_be_null=may_be_null
        )

    def _refuse_function(self, node: Call) -> NoReturn:
        if node.name in CLOCKS:
            why = f"{node.name} reads the clock, which is another one in each member, so their output would differ"
        elif node.name in CHANCES:
            why = f"{node.name} gives another value in each member, so their output would differ"
        elif node.name.startswith("esp_a"):
            why = f"{node.name} is an aggregate function: it stands alone in a field of an Aggregate window"
        else:
            why = f"there is no function {node.name}; there are {', '.join(sorted([*FUNCTIONS, 'isnull']))}"
        refuse(self._text, node.at, why)

    def _negative(self, node: Unary) -> _Value:
        value = self._number(node.operand, "-")
        kind = REAL if value.kind == REAL else INTEGER
        if isinstance(value.code, ast.Constant):
            return _Value(kind, _constant(-_literal(value.code)), nullable=False)
        return self._kept(self._combined([value], kind, lambda one: ast.UnaryOp(ast.USub(), one)))

    def _arithmetic(self, node: Binary) -> _Value:
        values = [self._number(operand, node.operator) for operand in (node.left, node.right)]
        kind = REAL if REAL in [value.kind for value in values] else INTEGER
        if node.operator in "/%":
            return self._divided(values, kind, node.operator)
        operator = {"+": ast.Add, "-": ast.Sub, "*": ast.Mult}[node.operator]()
        return self._kept(self._combined(values, kind, lambda *two: ast.BinOp(two[0], operator, two[1])))

    def _divided(self, values: list[_Value], kind: str, operator: str) -> _Value:
        by_zero = not (isinstance(values[1].code, ast.Constant) and values[1].code.value)
        if operator == "/" and kind == REAL:
            return self._combined(values, REAL, self._over if by_zero else _over, may_be_null=by_zero)
        helper = "_quotient" if operator == "/" else "_remainder"
        return self._kept(self._combined(values, kind, lambda *two: _called(helper, *two), may_be_null=True))

    def _over(self, left: ast.expr, right: ast.expr) -> ast.expr:
        named, name = self._named(right)
        return ast.IfExp(_compared(named, ast.NotEq(), _constant(0)), _over(left, name), _constant(None))

    def _compared(self, node: Binary) -> _Value:
        left, right = (self._value(operand) for operand in (node.left, node.right))
        kinds = {left.kind, right.kind}
        if NULL in kinds:
            refuse(self._text, node.at, "nothing equals null: write isnull(...)")
        alike = len(kinds) == 1 or kinds <= set(_NUMBERS)
        if not alike:
            refuse(self._text, node.at, f"{left.kind} and {right.kind} cannot be compared with {node.operator}")
        if node.operator not in ("==", "!=") and not kinds <= {*_NUMBERS, STRING, *_ORDERED}:
            refuse(self._text, node.at, f"values of type {left.kind} have no order: only == and != compare them")
        return self._combined([left, right], BOOLEAN, lambda *two: _compared(two[0], _COMPARE[node.operator](), two[1]))

    def _joined(self, node: Binary) -> _Value:
        values = []
        for operand in (node.left, node.right):
            value = self._value(operand)
            if value.kind == INTEGER:
                value = self._combined([value], STRING, lambda one: _called("_str", one))
            if value.kind != STRING:
                refuse(self._text, operand.at, f"& joins texts and integers, not values of type {value.kind}")
            values.append(value)
        return self._combined(values, STRING, lambda *two: ast.BinOp(two[0], ast.Add(), two[1]))

    def _logic(self, node: Logic) -> _Value:
        """`and` gives false as soon as one operand is false, `or` true as soon as one is true; then null if one is."""
        decides = node.operator == "or"
        values = [self._truth(operand) for operand in node.operands]
        if not any(value.nullable for value in values):
            return _Value(BOOLEAN, ast.BoolOp(ast.Or() if decides else ast.And(), [v.code for v in values]), False)
        tests, nulls = [], []
        for value in values:
            named, name = self._named(value.code)
            tests.append(_is(named, decides))
            if value.nullable:
                nulls.append(_is(name, None))
        rest = ast.IfExp(_any(nulls), _constant(None), _constant(not decides))
        return _Value(BOOLEAN, ast.IfExp(_any(tests), _constant(decides), rest))

    # kinds

    def _truth(self, node: Node) -> _Value:
        """A condition: a boolean, or a number that is not 0."""
        value = self._value(node)
        if value.kind not in (*_NUMBERS, NULL):
            refuse(self._text, node.at, f"a value of type {value.kind} is neither true nor false; compare it")
        return self._truth_of(value)

    def _truth_of(self, value: _Value) -> _Value:
        if value.kind in (BOOLEAN, NULL):
            return value._replace(kind=BOOLEAN)
        return self._combined([value], BOOLEAN, lambda one: _compared(one, ast.NotEq(), _constant(0)))

    def _number(self, node: Node, operator: str) -> _Value:
        value = self._value(node)
        if value.kind not in _NUMBERS:
            hint = "; & joins texts" if operator == "+" and value.kind == STRING else ""
            refuse(self._text, node.at, f"{operator} takes numbers, not values of type {value.kind}{hint}")
        return self._real(value) if value.kind == MONEY else value

    def _real(self, value: _Value) -> _Value:
        if value.kind == REAL:
            return value
        if isinstance(value.code, ast.Constant):
            return _Value(REAL, _constant(float(_literal(value.code))), nullable=False)
        return self._combined([value], REAL, lambda one: _called("_float", one))

    # code

    def _combined(
        self, values: Sequence[_Value], kind: str, combine: Callable[..., ast.expr], *, may_be_null: bool = False
    ) -> _Value:
        """What `combine` makes of these values; null if one of them is."""
        nulls, operands = [], []
        for value in values:
            if value.nullable:
                named, name = self._named(value.code)
                nulls.append(_is(named, None))
                operands.append(name)
            else:
                operands.append(value.code)
        code = combine(*operands)
        if nulls:
            code = ast.IfExp(_any(nulls), _constant(None), code)
        return _Value(kind, code, bool(nulls) or may_be_null)

    def _kept(self, value: _Value) -> _Value:
        """An integer of 64 bits, or null."""
        return self._in_range(value, 1 << 63) if value.kind == INTEGER else value

    def _in_range(self, value: _Value, limit: int) -> _Value:
        def checked(one: ast.expr) -> ast.expr:
            named, name = self._named(one)
            inside = ast.Compare(_constant(-limit), [ast.LtE(), ast.Lt()], [named, _constant(limit)])
            return ast.IfExp(inside, name, _constant(None))

        return self._combined([value], INTEGER, checked, may_be_null=True)

    def _named(self, code: ast.expr) -> tuple[ast.expr, ast.expr]:
        """The value under a name of its own, and the name for what comes after."""
        self._names += 1
        name = f"v{self._names}"
        return ast.NamedExpr(ast.Name(name, ast.Store()), code), ast.Name(name, ast.Load())


_COMPARE: dict[str, type[ast.cmpop]] = {
    "==": ast.Eq, "!=": ast.NotEq, "<": ast.Lt, "<=": ast.LtE, ">": ast.Gt, ">=": ast.GtE,
}  # fmt: skip


def _returns(program: Sequence[Statement]) -> list[Return]:
    found: list[Return] = []
    for statement in program:
        if isinstance(statement, If):
            found += _returns([statement.then] + ([statement.otherwise] if statement.otherwise else []))
        else:
            found.append(statement)
    return found


def _kind_of(value: object) -> str:
    return {bool: BOOLEAN, int: INTEGER, float: REAL, str: STRING}.get(type(value), NULL)


def _literal(code: ast.Constant) -> Any:
    return code.value


def _constant(value: Any) -> ast.Constant:
    return ast.Constant(value)


def _is(code: ast.expr, value: Any) -> ast.expr:
    return ast.Compare(code, [ast.Is()], [_constant(value)])


def _any(tests: list[ast.expr]) -> ast.expr:
    return tests[0] if len(tests) == 1 else ast.BoolOp(ast.Or(), tests)


def _compared(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> ast.expr:
    return ast.Compare(left, [operator], [right])


def _over(left: ast.expr, right: ast.expr) -> ast.expr:
    return ast.BinOp(left, ast.Div(), right)


def _called(helper: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(helper, ast.Load()), list(arguments), [])
