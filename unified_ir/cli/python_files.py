"""Python files of the user's own, named on the command line as FILE.py:NAME."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from triplane.proto.errors import InvalidInput, NotFound, TriplaneError

if TYPE_CHECKING:
    from triplane.unified_ir.federated.algorithms import Algorithm


def load_module(path: Path, what: str) -> ModuleType:
    """Run a Python file and return its module. what: what the file should define, for errors.

    NotFound: there is no such file. InvalidInput: it raises an error, which is named with its line.
    """
    if not path.is_file():
        raise NotFound(f"no file {path}; give the path of the Python file that defines {what}")
    sys.path.insert(0, str(path.resolve().parent))  # the file may import modules beside it
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses and pickle look for the classes of the file
    try:
        spec.loader.exec_module(module)
    except TriplaneError:
        raise
    except Exception as error:
        message = f"{path}{_line(error, path)} raises {type(error).__name__}: {error}; fix the file"
        raise InvalidInput(message) from error
    return module


def _line(error: Exception, path: Path) -> str:
    """Return the last line of the file that the error passed, as ", line 3"."""
    if isinstance(error, SyntaxError):
        return ""  # its message names file and line
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename) == path.resolve()]
    return f", line {lines[-1]}," if lines else ""


def load_algorithm(spec: str) -> Algorithm:
    """Return the federated algorithm that FILE.py:NAME names, with the file's digest as revision.

    NotFound: there is no such file or name. InvalidInput: the name is not an `Algorithm`.
    """
    from triplane.unified_ir.federated.algorithms import ALGORITHMS, Algorithm

    file, _, name = spec.rpartition(":")
    path = Path(file)
    module = load_module(path, "the algorithm")
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
