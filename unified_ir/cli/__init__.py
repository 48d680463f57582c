"""The `triplane` command; `shell` holds the verbs' common ground, each other module is one verb."""

import sys


def main() -> None:
    """Console entry point: runs one verb and exits with the code of `shell.EXIT_CODES`."""
    from triplane.unified_ir.cli.shell import run

    sys.exit(run(sys.argv[1:]))
