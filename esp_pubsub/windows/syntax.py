"""The text of a SAS expression as a tree. Pure.

    price * quantity
    if ID % 2 == 1 and match_string(symbol, "IBM") then return price else return 0.0

What is read is the part of SAS's expression language that computes a value from the fields of one event: no variable
outlives the event, nothing is called but what `functions.py` lists. Words and names of functions are the same in upper
and lower case, names of fields are not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from esp_pubsub import ExpressionError

MAX_TEXT = 10_000
MAX_DEPTH = 64
"""How deep an expression may be nested; each term of a sum counts as one level, terms of `and` and `or` do not."""
TOO_DEEP = f"this is nested more than {MAX_DEPTH} deep; compute a part of it in a Compute window before this one"


@dataclass(frozen=True, slots=True)
class Constant:
    """A number, a text, true, false or null."""

    at: int
    value: int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Name:
    """A field of the event."""

    at: int
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """A function of this name, in lower case, and what it is called with."""

    at: int
    name: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Unary:
    """`-` or `not`."""

    at: int
    operator: str
    operand: Node


@dataclass(frozen=True, slots=True)
class Binary:
    """Arithmetic, `&` or a comparison."""

    at: int
    operator: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Logic:
    """`and` or `or` between two operands or more."""

    at: int
    operator: str
    operands: tuple[Node, ...]


Node = Constant | Name | Call | Unary | Binary | Logic


@dataclass(frozen=True, slots=True)
class Return:
    """`return value`, or the value alone."""

    at: int
    value: Node


@dataclass(frozen=True, slots=True)
class If:
    """`if condition then ... else ...`; what is not said does nothing."""

    at: int
    condition: Node
    then: Statement
    otherwise: Statement | None


Statement = Return | If
Program = tuple[Statement, ...]


def refuse(text: str, at: int, why: str) -> NoReturn:
    """ExpressionError, with the place in the text."""
    line = text.count("\n", 0, at) + 1
    column = at - (text.rfind("\n", 0, at) + 1) + 1
    here = text[at : at + 20].split("\n")[0].strip()
    place = f"character {column}" if line == 1 else f"line {line}, character {column}"
    shown = text if len(text) <= 60 else text[:57] + "..."
    raise ExpressionError(f"{why} (in {shown!r} at {place}{f', {here!r}' if here else ''})", text=text, at=at)


def parse(text: str) -> Program:
    """The statements of this text. ExpressionError where it is not of the language."""
    if not isinstance(text, str):
        raise ExpressionError(f"an expression is a text, not {type(text).__name__}", text="", at=0)
    if len(text) > MAX_TEXT:
        refuse(text, 0, f"an expression has at most {MAX_TEXT:,} characters, not {len(text):,}")
    program = _Parser(text).program()
    check_depth(text, program)
    return program


# tokens


class Token(NamedTuple):
    """A piece of the text. `kind` is number, text, name, word or sign; `end` comes after the last one."""

    kind: str
    value: str
    at: int


WORDS = frozenset({"and", "or", "not", "if", "then", "else", "return", "true", "false", "null"})
_DECLARES = frozenset(
    {"integer", "real", "string", "boolean", "date", "bytes", "pointer", "private", "public", "static", "hidden"}
)
_MOST_DIGITS = 400  # a longer number is a mistake, and int() takes its time
_TOKEN = re.compile(
    r"""(?P<blank>\s+|//[^\n]*|/\*.*?\*/)
      | (?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
      | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<quoted>`[^`\n]+`)
      | (?P<name>[^\W\d]\w*)
      | (?P<sign>==|!=|<>|<=|>=|[-+*/%&<>=(),;])""",
    re.VERBOSE | re.DOTALL,
)
_VALUES = {"true": True, "false": False, "null": None}
_ASSIGNS = re.compile(r"(?:\w+|`[^`]*`)\s*=(?!=)")
_ESCAPED = {"\\": "\\", '"': '"', "'": "'", "n": "\n", "r": "\r", "t": "\t"}
_UNREAD = {'"': "this text has no end", "'": "this text has no end", "/": "this comment has no end",
           "`": "this name has no end"}  # fmt: skip


def tokens(text: str) -> Iterator[Token]:
    """The pieces of the text, without blanks and comments."""
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None or (text.startswith("/*", at) and found.lastgroup != "blank"):
            refuse(text, at, _UNREAD.get(text[at], "this character means nothing in an expression"))
        kind, value = str(found.lastgroup), found[0]
        if kind == "name" and value.lower() in WORDS:
            yield Token("word", value.lower(), at)
        elif kind == "quoted":
            yield Token("name", value[1:-1], at)
        elif kind != "blank":
            yield Token(kind, value, at)
        at = found.end()
    yield Token("end", "", at)


# grammar


_LEVELS = (("or",), ("and",), (), ("==", "=", "!=", "<>", "<", "<=", ">", ">="), ("&",), ("+", "-"), ("*", "/", "%"))
_LEVEL = {sign: level for level, signs in enumerate(_LEVELS) for sign in signs}
_NOT = 2
_COMPARISON = 3
_SAME = {"=": "==", "<>": "!="}


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = tokens(text)
        self._now = next(self._tokens)
        self._depth = 0

    def program(self) -> Program:
        if self._now.kind == "end":
            self._refuse("there is no expression")
        if not self._is("word", "if") and not self._is("word", "return"):
            only = Return(self._now.at, self._value())
            if self._now.kind != "end" or self._assigns(only.at):
                self._refuse_rest(only.value, only.at)
            return (only,)
        statements = [self._statement()]
        while True:
            while self._take("sign", ";"):
                pass
            if self._now.kind == "end":
                return tuple(statements)
            statements.append(self._statement())

    def _statement(self) -> Statement:
        at = self._now.at
        if self._take("word", "return"):
            return Return(at, self._value())
        if not self._take("word", "if"):
            self._refuse_rest(self._value(), at)
        with self._deeper(at):
            condition = self._value()
            self._take("word", "then")
            then = self._statement()
            if self._is("sign", ";") and re.match(r";\s*else\b", self._text[self._now.at :], re.IGNORECASE):
                self._next()
            return If(at, condition, then, self._statement() if self._take("word", "else") else None)

    def _refuse_rest(self, value: Node, at: int) -> NoReturn:
        """What stands where a statement should be, or after an expression that is alone."""
        declares = isinstance(value, Name) and value.name.lower() in _DECLARES and self._now.kind == "name"
        if declares or self._assigns(at):
            refuse(
                self._text,
                at,
                "an expression keeps no variable; compute the value in one expression, or write == to compare",
            )
        if self._now.kind != "end" and not self._is("sign", ";") and not self._is("word", "else"):
            self._refuse("an operator or the end of the expression is expected here")
        refuse(self._text, at, "a statement is `return value` or `if condition then ... else ...`")

    def _assigns(self, at: int) -> bool:
        """A statement `name = value` sets a variable in SAS's language; anywhere else a single `=` compares."""
        return _ASSIGNS.match(self._text, at) is not None

    def _value(self, lowest: int = 0) -> Node:
        """Operators of this level and above it, those of one level from left to right."""
        with self._deeper(self._now.at):
            value = self._negated() if lowest <= _NOT and self._is("word", "not") else self._single()
            while (level := self._level()) >= lowest:
                sign = self._next()
                right = self._value(level + 1)
                operator = _SAME.get(sign.value, sign.value)
                if sign.kind == "word":
                    value = self._joined(sign.at, operator, value, right)
                else:
                    value = Binary(sign.at, operator, value, right)
                if level == self._level() == _COMPARISON:
                    self._refuse("comparisons are not chained: write a < b and b < c")
            return value

    def _joined(self, at: int, operator: str, left: Node, right: Node) -> Logic:
        several = isinstance(left, Logic) and left.operator == operator
        return Logic(at, operator, (*(left.operands if several else (left,)), right))  # type: ignore[union-attr]

    def _negated(self) -> Unary:
        at = self._next().at
        return Unary(at, "not", self._value(_NOT))

    def _single(self) -> Node:
        token = self._next()
        if token.kind == "sign" and token.value in ("-", "+"):
            with self._deeper(token.at):
                operand = self._single()
                return Unary(token.at, "-", operand) if token.value == "-" else operand
        if token.kind == "sign" and token.value == "(":
            inner = self._value()
            self._expect(")")
            return inner
        if token.kind == "name":
            return self._call(token) if self._take("sign", "(") else Name(token.at, token.value)
        return self._constant(token)

    def _call(self, name: Token) -> Call:
        arguments: list[Node] = []
        if not self._take("sign", ")"):
            arguments.append(self._value())
            while self._take("sign", ","):
                arguments.append(self._value())
            self._expect(")")
        return Call(name.at, name.value.lower(), tuple(arguments))

    def _constant(self, token: Token) -> Constant:
        if token.kind == "number":
            return Constant(token.at, self._number(token))
        if token.kind == "text":
            inner = re.sub(r"\\(.)", lambda found: self._escaped(token, found), token.value[1:-1], flags=re.DOTALL)
            return Constant(token.at, inner)
        if token.kind == "word" and token.value in _VALUES:
            return Constant(token.at, _VALUES[token.value])
        what = "the expression ends" if token.kind == "end" else f"{token.value!r} stands"
        refuse(self._text, token.at, f"{what} where a value is expected: a field, a number, a text or a function")

    def _number(self, token: Token) -> int | float:
        if len(token.value) > _MOST_DIGITS:
            refuse(self._text, token.at, f"this number has more than {_MOST_DIGITS} characters")
        if not token.value.isdecimal():
            if math.isinf(float(token.value)):
                refuse(self._text, token.at, "this number is larger than a double holds")
            return float(token.value)
        if int(token.value) >= 1 << 63:
            refuse(self._text, token.at, "this integer is larger than 64 bits hold; write it with a decimal point")
        return int(token.value)

    def _escaped(self, token: Token, found: re.Match[str]) -> str:
        if found[1] not in _ESCAPED:
            refuse(self._text, token.at + 1 + found.start(), r"in a text \ comes before \ \" ' n r t only")
        return _ESCAPED[found[1]]

    # where we are

    def _level(self) -> int:
        """Of the operator that comes now; -1 if none does."""
        return _LEVEL.get(self._now.value, -1) if self._now.kind in ("sign", "word") else -1

    def _is(self, kind: str, value: str) -> bool:
        return self._now.kind == kind and self._now.value == value

    def _take(self, kind: str, value: str) -> bool:
        taken = self._is(kind, value)
        if taken:
            self._next()
        return taken

    def _next(self) -> Token:
        token = self._now
        if token.kind != "end":
            self._now = next(self._tokens)
        return token

    def _expect(self, sign: str) -> None:
        if not self._take("sign", sign):
            self._refuse(f"{sign!r} is expected here")

    def _refuse(self, why: str) -> NoReturn:
        refuse(self._text, self._now.at, why)

    @contextmanager
    def _deeper(self, at: int) -> Iterator[None]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            refuse(self._text, at, TOO_DEEP)
        yield
        self._depth -= 1


def check_depth(text: str, program: Program) -> None:
    """A sum of many terms is not nested where it is written, but its tree is."""
    rest: list[tuple[Statement | Node, int]] = [(statement, 1) for statement in program]
    while rest:
        node, depth = rest.pop()
        if depth > MAX_DEPTH:
            refuse(text, node.at, TOO_DEEP)
        rest += [(child, depth + 1) for child in _children(node)]


def _children(node: Statement | Node) -> tuple[Statement | Node, ...]:
    match node:
        case Return(value=value) | Unary(operand=value):
            return (value,)
        case If(condition=condition, then=then, otherwise=otherwise):
            return (condition, then) if otherwise is None else (condition, then, otherwise)
        case Binary(left=left, right=right):
            return (left, right)
        case Logic(operands=several) | Call(arguments=several):
            return several
    return ()
