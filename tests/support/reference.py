"""The API reference, docs/reference/: a page for each package that exports names."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"
NAMES = ROOT / "tests" / "packaging" / "public_names.txt"
INDEX = """# API reference

Every public name of every package, with its signature and what it does. `help(name)` in Python
shows the rest of each text, and the other pages of the [documentation](../README.md) show the names
in use. This folder is generated from the code.

| package | is for |
|---|---|
"""
SHOWN = (type(None), bool, int, float, str, bytes)
"""Types of defaults that a signature shows; others, which may be long, are `...`."""


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    packages = dict(line.split(": ", 1) for line in NAMES.read_text().splitlines())
    texts = {f"{name}.md": page(name, names.split()) for name, names in sorted(packages.items())}
    rows = [f"| [`{name}`]({name}.md) | {summary_of(name)} |\n" for name in sorted(packages)]
    return {"README.md": INDEX + "".join(rows), **texts}


def summary_of(package: str) -> str:
    """Return the first line of a package's docstring."""
    return plain((importlib.import_module(package).__doc__ or "").partition("\n")[0])


def page(package: str, names: list[str]) -> str:
    """Return the page of one package."""
    module = importlib.import_module(package)
    entries = (entry for name in names for entry in lines(name, getattr(module, name)))
    return f"# {package}\n\n{summary_of(package)}\n" + "".join(f"\n{entry}\n" for entry in entries)


def lines(name: str, value: object) -> Iterator[str]:
    """Yield the entry of a public name: heading, text, methods."""
    yield f"## `{name}{signature(value)}`"
    if text := described(value):
        yield text
    if inspect.isclass(value):
        rows = [row for key, method in vars(value).items() if (row := method_row(key, method))]
        if rows:
            yield "\n".join(rows)


def method_row(name: str, method: object) -> str:
    """Return the line of a public method or property, empty for anything else."""
    if name.startswith("_"):
        return ""
    function = getattr(method, "fget", None) or getattr(method, "__func__", method)
    text = described(function)
    if not isinstance(function, FunctionType) or not text or text.startswith("See "):
        return ""
    shown = "" if isinstance(method, property) else signature(function, bound=True)
    return f"* `{name}{shown}`: {text}"


def signature(value: object, *, bound: bool = False) -> str:
    """Return the parameters without types, or nothing if `value` is not called by a user."""
    function = getattr(value, "__init__", None) if inspect.isclass(value) else value
    if not isinstance(function, FunctionType):
        return ""
    parameters = list(inspect.signature(function).parameters.values())
    skipped = 1 if bound or inspect.isclass(value) else 0
    stripped = [parameter.replace(annotation=parameter.empty) for parameter in parameters[skipped:]]
    return re.sub(r"'<(\.\.\.)>'", r"\1", str(inspect.Signature([shortened(p) for p in stripped])))


def shortened(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return the parameter with a default that fits into a line."""
    if parameter.default is parameter.empty or isinstance(parameter.default, SHOWN):
        return parameter
    if parameter.default in ((), []):
        return parameter
    return parameter.replace(default="<...>")


def described(value: object) -> str:
    """Return the first paragraph of its own docstring on one line."""
    text = inspect.cleandoc(getattr(value, "__doc__", None) or "")
    if inspect.isclass(value) and text.startswith(f"{value.__name__}("):  # made by dataclass
        return ""
    own = inspect.isclass(value) or inspect.isroutine(value)
    return plain(" ".join(text.partition("\n\n")[0].split())) if own else ""


def plain(text: str) -> str:
    """Escape what Markdown would take for markup, outside of code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_<|\[\]])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)
