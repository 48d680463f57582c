"""Rules of the product that can be broken, one edit each: a flipped comparison, a removed check.

A site is found in the syntax tree and written back as text, so the rest of a file stays as it is.
Annotations, docstrings and what only type checkers read are left alone.
"""

import ast
import re
from dataclasses import dataclass

SWAPPED = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "+"),
    ast.FloorDiv: ("//", "*"),
}
OPPOSITE = {"min": "max", "max": "min", "any": "all", "all": "any"}
ANNOTATED = ("annotation", "returns")


@dataclass(frozen=True)
class Mutant:
    """Replace the text from `start` to `end` (offsets in bytes) of a file by `text`."""

    path: str
    line: int
    start: int
    end: int
    text: str
    kind: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def shown(self, source: bytes) -> str:
        """The line before and after, for a table."""
        before = source.splitlines()[self.line - 1].decode().strip()
        after = self.applied(source).splitlines()[self.line - 1].decode().strip()
        return f"`{before}` -> `{after}`".replace("|", "\\|")


class Finder(ast.NodeVisitor):
    """Collects the sites of one module, in the order of the file."""

    def __init__(self, path, source):
        self.path, self.source, self.mutants = path, source, []
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def start(self, node):
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node):
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def add(self, kind, start, end, text):
        line = self.source.count(b"\n", 0, start) + 1
        self.mutants.append(Mutant(self.path, line, start, end, text, kind))

    def add_swapped(self, operator, left, right):
        """The operator's token stands between two operands, beside brackets and line ends."""
        if type(operator) not in SWAPPED:
            return
        pattern, new = SWAPPED[type(operator)]
        start, end = self.end(left), self.start(right)
        word = rf"\b{pattern}\b" if pattern[0].isalpha() else pattern
        token = re.search(word.encode(), self.source[start:end])
        if token:
            kind = type(operator).__name__
            self.add(kind, start + token.start(), start + token.end(), new)

    def visit(self, node):
        if isinstance(node, ast.JoinedStr):
            return  # positions inside are not reliable before Python 3.12
        super().visit(node)

    def generic_visit(self, node):
        for name, field in ast.iter_fields(node):
            if name in ANNOTATED:
                continue
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    self.visit(child)

    def visit_Compare(self, node):
        operands = [node.left, *node.comparators]
        for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
            self.add_swapped(operator, left, right)
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        self.add_swapped(node.op, node.values[0], node.values[1])
        self.generic_visit(node)

    def visit_BinOp(self, node):
        self.add_swapped(node.op, node.left, node.right)
        self.generic_visit(node)

    def visit_If(self, node):
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node):
        self._negate(node.test)
        self.generic_visit(node)

    def _negate(self, test):
        start, end = self.start(test), self.end(test)
        inner = self.source[start:end].decode()
        self.add("condition", start, end, f"(not ({inner}))")

    def visit_Constant(self, node):
        if type(node.value) is int:
            self.add("number", self.start(node), self.end(node), str(node.value + 1))

    def visit_Raise(self, node):
        self.add("raise", self.start(node), self.end(node), "pass")
        self.generic_visit(node)

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call | ast.Await):
            self.add("call", self.start(node), self.end(node), "pass")
            self.generic_visit(node)

    def visit_Call(self, node):
        if isinstance(node.func, ast.Name) and node.func.id == "sample":
            return  # an input for the tests of an operator
        if isinstance(node.func, ast.Name) and node.func.id in OPPOSITE:
            self.add("opposite", self.start(node.func), self.end(node.func), OPPOSITE[node.func.id])
        self.generic_visit(node)


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Return every way to break one rule of a module, in the order of its lines."""
    finder = Finder(path, source)
    finder.visit(ast.parse(source))
    return sorted(finder.mutants, key=lambda mutant: (mutant.start, mutant.end))
