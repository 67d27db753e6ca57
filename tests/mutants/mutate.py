"""Mutants of a module: its source with one small bug, at places found in the syntax tree.

Only code in functions is changed: a negated condition, a bound off by one, `or` for `and`, a
missing call or assignment, a number one too large, a function that returns at once. Docstrings,
logs, assertions and annotations are not changed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

BOUNDS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
OPPOSITES = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
EXTREMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
SPOKEN = {"log", "warnings"}
MOST = 16


@dataclass(frozen=True)
class Edit:
    """Replacement of some bytes of a source."""

    kind: str
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        """Return the source with this replacement."""
        return source[: self.start] + self.text.encode() + source[self.end :]


@dataclass(frozen=True)
class Mutant:
    """A module with one bug, and its first changed line."""

    path: str
    line: int
    kind: str
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}\n    - {self.before}\n    + {self.after}"


def mutants(path: str, source: str) -> list[Mutant]:
    """Return all distinct mutants of a module that are valid Python."""
    found: dict[str, Mutant] = {}
    for edit in _Finder(source).edits():
        mutant = mutant_of(path, source, edit.kind, edit.apply(source.encode()).decode())
        if mutant is not None:
            found.setdefault(mutant.source, mutant)
    return sorted(found.values(), key=lambda each: each.line)


def mutant_of(path: str, source: str, kind: str, mutated: str) -> Mutant | None:
    """Return the mutant for a changed source, or None if it is not valid Python."""
    try:
        ast.parse(mutated)
    except SyntaxError:
        return None
    old, new = source.splitlines(), mutated.splitlines()
    at = next(n for n, (one, two) in enumerate(zip(old, new, strict=False)) if one != two)
    return Mutant(path, at + 1, kind, old[at].strip(), new[at].strip(), mutated)


class _Finder:
    """Finds all edits of one module."""

    def __init__(self, source: str) -> None:
        self._source = source.encode()
        self._tree = ast.parse(source)
        self._lines = [0]
        for line in self._source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        # Conditions whose negation is a mutant already.
        self._tests: set[ast.expr] = set()
        self._is_maker = False

    def edits(self) -> Iterator[Edit]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from self._leave_at_once(node)
                self._is_maker = node.name == "__init__"
                for statement in _body(node):
                    yield from self._walk(statement)

    def _walk(self, node: ast.AST) -> Iterator[Edit]:
        if _is_only_said(node):
            return
        yield from self._at(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(
                node, ast.Call
            ):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._walk(child)

    # ------------------------------------------------------------ one place

    def _at(self, node: ast.AST) -> Iterator[Edit]:
        yield from self._negated(node)
        match node:
            case ast.Compare(ops=[op], comparators=[right]):
                yield from self._compared(node, op, right)
            case ast.BoolOp():
                yield from self._joined(node)
            case ast.UnaryOp(op=ast.Not()) if node not in self._tests:
                yield self._replace("not left out", node, self._text(node.operand))
            case ast.BinOp(op=ast.Add() | ast.Sub() as op):
                one, other = ("+", "-") if isinstance(op, ast.Add) else ("-", "+")
                yield self._between(f"{other} for {one}", node.left, node.right, one, other)
            case ast.Call(func=ast.Name(id=name) as function) if name in EXTREMES:
                yield self._replace("the other extreme", function, EXTREMES[name])
            case ast.Constant(value=bool(value)):
                yield self._replace("the other truth", node, str(not value))
            case ast.Constant(value=int(value)) if 0 <= value <= MOST:
                yield self._replace("one too many", node, str(value + 1))
            case ast.Continue():
                yield self._replace("loop left", node, "break")
            case ast.Break():
                yield self._replace("loop not left", node, "pass")
            case ast.Assign() if self._is_maker:
                pass  # any use reveals a missing attribute
            case ast.stmt() if _is_droppable(node):
                yield self._replace("left out", node, "pass")

    def _negated(self, node: ast.AST) -> Iterator[Edit]:
        tests: list[ast.expr] = []
        match node:
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                tests = [test]
            case ast.comprehension(ifs=ifs):
                tests = ifs
            case ast.match_case(guard=ast.expr() as guard):
                tests = [guard]
        for test in tests:
            if not isinstance(test, ast.Constant):
                self._tests.add(test)
                yield self._replace("negated", test, f"(not ({self._text(test)}))")

    def _compared(self, node: ast.Compare, op: ast.cmpop, right: ast.expr) -> Iterator[Edit]:
        words = BOUNDS.get(type(op))
        if words is None and node not in self._tests:
            words = OPPOSITES.get(type(op))
        if words is not None:
            yield self._between("compared otherwise", node.left, right, *words)

    def _joined(self, node: ast.BoolOp) -> Iterator[Edit]:
        one, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield self._between(f"{other} for {one}", left, right, one, other)

    def _leave_at_once(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Edit]:
        body = _body(node)
        is_void = isinstance(node.returns, ast.Constant) and node.returns.value is None
        if not is_void or not body or node.name == "__init__":
            return
        if len(body) == 1 and (_is_droppable(body[0]) or _is_only_said(body[0])):
            return
        if not any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(node)):
            start = self._start(body[0])
            yield Edit("left at once", start, start, "return\n" + " " * body[0].col_offset)

    # ------------------------------------------------------------ text

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        return self._source[self._start(node) : self._end(node)].decode()

    def _replace(self, kind: str, node: ast.expr | ast.stmt, text: str) -> Edit:
        return Edit(kind, self._start(node), self._end(node), text)

    def _between(self, kind: str, left: ast.expr, right: ast.expr, one: str, other: str) -> Edit:
        start, end = self._end(left), self._start(right)
        between = self._source[start:end].decode()
        return Edit(kind, start, end, between.replace(one, other, 1))


def _body(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """Return a function's statements without its docstring."""
    has_doc = ast.get_docstring(node, clean=False) is not None
    return node.body[1:] if has_doc else node.body


def _is_only_said(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Raise() | ast.FunctionDef():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in SPOKEN
    return False


def _is_droppable(node: ast.AST) -> bool:
    """Return whether a function still makes sense without this statement."""
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
            return True
        case ast.Assign(targets=[target]):
            return not isinstance(target, ast.Name | ast.Tuple)
    return False
