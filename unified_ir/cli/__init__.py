"""The `triplane` command: `shell` has what all verbs share; most other modules are one verb."""

import sys


def main() -> None:
    """Console entry point: run one verb and exit with its code, see `shell.EXIT_CODES`."""
    from triplane.unified_ir.cli.shell import run

    sys.exit(run(sys.argv[1:]))
