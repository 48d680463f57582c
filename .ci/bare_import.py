"""Imports `triplane.unified_ir`, all but the command, where only the base set is installed.

Run by `.ci/run` in an environment without grpcio, click, rich and jax: a module that reaches for
one of them outside its door fails here with its own name.
"""

import importlib
import pkgutil
import sys

import triplane.unified_ir as package

ABSENT = ("grpc", "click", "rich", "jax", "starlette", "tuf", "cryptography")
COMMAND = "triplane.unified_ir.cli"


def main() -> None:
    names = [package.__name__]
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name != COMMAND and not module.name.startswith(COMMAND + "."):
            importlib.import_module(module.name)
            names.append(module.name)
    found = [name for name in ABSENT if name in sys.modules]
    if found:
        sys.exit(f"imported from somewhere: {', '.join(found)}")
    print(f"{len(names)} modules import on the base set alone")


if __name__ == "__main__":
    main()
