"""Imports `triplane.unified_ir`, all but the command, where only the base set is installed.

Run by `.ci/run` in an environment without grpcio, click, rich and jax: a module that reaches for
one of them outside its door fails here with its own name.
"""

import importlib
import pkgutil
import sys

import triplane.unified_ir as package
from triplane.proto.errors import MissingExtra

ABSENT = ("grpc", "click", "rich", "jax", "starlette", "tuf", "cryptography")
COMMAND = "triplane.unified_ir.cli"
EXTRAS = {
    "triplane.unified_ir.engines.xla.": "triplane[xla]",
    "triplane.unified_ir.federated.study.cohort_scores": "triplane[xla]",
    "triplane.unified_ir.federated.masking.": "triplane[device]",
}
"""Packages and modules that need an extra, which their errors name."""


def import_one(name: str) -> None:
    """Import a module; one of an extra may only fail by naming it."""
    try:
        importlib.import_module(name)
    except MissingExtra as error:
        if not any(name.startswith(p) and extra in str(error) for p, extra in EXTRAS.items()):
            raise


def main() -> None:
    names = [package.__name__]
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name != COMMAND and not module.name.startswith(COMMAND + "."):
            import_one(module.name)
            names.append(module.name)
    found = [name for name in ABSENT if name in sys.modules]
    if found:
        sys.exit(f"imported from somewhere: {', '.join(found)}")
    print(f"{len(names)} modules import on the base set alone")


if __name__ == "__main__":
    main()
