"""Python files of the user's own, named on the command line as FILE.py:NAME."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import TYPE_CHECKING

from triplane.proto.errors import InvalidInput, NotFound, TriplaneError

if TYPE_CHECKING:
    from triplane.unified_ir.federated.algorithms import Algorithm


def load_module(path: Path, what: str) -> ModuleType:
    """Run a Python file and return its module. what: what the file should define, for errors.

    What it prints goes to standard error, since standard output belongs to the command.
    NotFound: there is no such file. What the file itself raises is passed on (`blame_file`).
    """
    if not path.is_file():
        raise NotFound(f"no file {path}; give the path of the Python file that defines {what}")
    # A file json.py must not take the place of Python's json, here or in imports to come.
    is_taken = _is_library(path.stem)
    name = f"{path.stem}_" if is_taken else path.stem
    # The file may import modules beside it.
    sys.path.insert(len(sys.path) if is_taken else 0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickle look for the classes of the file
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except SystemExit as error:
        blame_file(error, str(path))
        raise
    return module


def _is_library(name: str) -> bool:
    """Return whether it is a module of Python's, or a package that is loaded."""
    return name in sys.stdlib_module_names or hasattr(sys.modules.get(name), "__path__")


def blame_file(error: BaseException, file: str) -> None:
    """Raise InvalidInput with the last line of the user's file in the trace of `error`, if any."""
    path = str(Path(file).resolve())
    lines = [f.lineno for f in extract_tb(error.__traceback__) if f.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        lines.append(error.lineno)
    if lines:
        what = error.msg if isinstance(error, SyntaxError) else error
        raise InvalidInput(f"{file}:{lines[-1]}: {type(error).__name__}: {what}") from error


def load_algorithm(spec: str) -> Algorithm:
    """Return the federated algorithm that FILE.py:NAME names, with the file's digest as revision.

    NotFound: there is no such file or name. InvalidInput: the name is not an `Algorithm`, or the
    file raises an error, which is named with its line.
    """
    from triplane.unified_ir.federated.algorithms import ALGORITHMS, Algorithm

    file, _, name = spec.rpartition(":")
    path = Path(file)
    try:
        module = load_module(path, "the algorithm")
    except TriplaneError:
        raise
    except Exception as error:
        blame_file(error, file)
        raise
    rows = {k: row for k, row in vars(module).items() if isinstance(row, Algorithm)}
    if name not in vars(module):
        own = [k for k, row in rows.items() if row.name not in ALGORITHMS]
        raise NotFound(f"{path} defines no {name!r}; algorithms there: {', '.join(own) or 'none'}")
    if name not in rows:
        raise InvalidInput(
            f"{spec} is of type {type(vars(module)[name]).__name__}; it must be an Algorithm of "
            "triplane.unified_ir.federated.algorithms"
        )
    # The graphs are in the plan, but the cloud's optimizer is only in the file.
    return replace(rows[name], revision=hashlib.sha256(path.read_bytes()).hexdigest())
