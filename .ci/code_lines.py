"""Count the lines of code in the hand-written product: `.ci/code_lines.py [--each] [FOLDER ...]`.

A line counts when it holds a token of code: comments, docstrings and blank lines do not, and
neither does generated code. Tokens are counted beside lines because a denser format lowers only
the number of lines. Without folders it counts the five packages. `--each` adds a row for each file.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("proto", "unified_ir", "cloud", "edge", "device")
GENERATED = ("_pb2.py", "_pb2_grpc.py")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Count(NamedTuple):
    """What some files hold together."""

    files: int = 0
    lines: int = 0
    tokens: int = 0

    def plus(self, other: Count) -> Count:
        """Return the sum of two counts."""
        return Count(*(a + b for a, b in zip(self, other, strict=True)))


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the lines of every string that is a statement of its own.

    These are the docstrings of modules, classes and functions, and those below constants and
    fields.
    """
    alone = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
    return {n for text in alone for n in range(text.lineno, (text.end_lineno or 0) + 1)}


def count(path: Path) -> Count:
    """Count one file."""
    docstrings = docstring_lines(ast.parse(path.read_bytes()))
    with path.open("rb") as file:
        code = [
            token
            for token in tokenize.tokenize(file.readline)
            if token.type not in LAYOUT and token.start[0] not in docstrings
        ]
    lines = {n for token in code for n in range(token.start[0], token.end[0] + 1)}
    return Count(1, len(lines), len(code))


def files(folder: Path) -> list[Path]:
    """Return the hand-written modules below a folder, sorted."""
    return [path for path in sorted(folder.rglob("*.py")) if not path.name.endswith(GENERATED)]


def main(arguments: list[str]) -> None:
    """Print a row for each folder, and the sum."""
    root = Path(__file__).resolve().parents[1]
    each = "--each" in arguments
    folders = [name for name in arguments if name != "--each"] or PACKAGES
    total = Count()
    print(f"{'files':>7}{'lines':>9}{'tokens':>10}")
    for folder in folders:
        below = Count()
        for path in files(root / folder):
            below = below.plus(counted := count(path))
            if each:
                print(f"{'':7}{counted.lines:9,}{counted.tokens:10,}  {path.relative_to(root)}")
        print(f"{below.files:7,}{below.lines:9,}{below.tokens:10,}  {folder}")
        total = total.plus(below)
    print(f"{total.files:7,}{total.lines:9,}{total.tokens:10,}  in all")


if __name__ == "__main__":
    main(sys.argv[1:])
