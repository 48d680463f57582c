"""A name stands for one thing: class names are unique, and results are named by what they are.

`open_names.txt` lists what is still open, `class NAME` and `words FILE`, and may only shrink: an
entry that is no longer needed fails the test. To drop such entries:
TRIPLANE_ACCEPT=1 python -m pytest tests/packaging/test_names.py
"""

import ast
import os
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("proto", "unified_ir", "cloud", "edge", "device")
LIST = Path(__file__).with_name("open_names.txt")
WORDS = {"found", "made", "given", "told"}
"""Words that say that there is a value, not which one."""


def modules():
    for package in PRODUCT:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_bytes())


def identifiers(tree):
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name", "asname"):
            yield getattr(node, field, None)


def open_names():
    """What breaks a rule now, as lines of the list."""
    classes: Counter[str] = Counter()
    files = set()
    for path, tree in modules():
        classes.update(node.name for node in tree.body if isinstance(node, ast.ClassDef))
        if not WORDS.isdisjoint(identifiers(tree)):
            files.add(path)
    repeated = {name for name, count in classes.items() if count > 1}
    return {f"class {name}" for name in repeated} | {f"words {path}" for path in files}


def test_class_names_are_unique_and_results_are_named_by_what_they_are():
    now, listed = open_names(), set(LIST.read_text().splitlines())
    assert sorted(now - listed) == [], (
        f"a class name of the product stands for one thing, and no identifier is one of "
        f"{', '.join(sorted(WORDS))}: name each by what it is"
    )
    if os.environ.get("TRIPLANE_ACCEPT") == "1":
        LIST.write_text("".join(f"{line}\n" for line in sorted(now)))
    else:
        assert sorted(listed - now) == [], f"no longer needed; take them out of {LIST.name}"
