"""`triplane audit`: read the audit log, and verify that it was not rewritten."""

from __future__ import annotations

from pathlib import Path

import click

from triplane.cloud.cli.connection import calls, client_options
from triplane.cloud.cli.options import MAX_NUMBER
from triplane.unified_ir.cli.shell import open_output

EPILOG = """\b
Examples:
  triplane audit verify
  triplane audit verify --head 118:5f0c...e2      the head you noted last time

\b
Every entry holds the digest of the one before it, so a changed, dropped or inserted entry breaks
the chain. Someone who owns the cloud could rewrite the whole chain: only a head you keep elsewhere
shows that. Note the head this command prints, and give it next time.
"""


@click.group("audit")
def command() -> None:
    """The log of what was done, by whom."""


@command.command("ls", short_help="List entries from a number on.")
@click.option(
    "--from", "first", type=click.IntRange(1, MAX_NUMBER), default=1, show_default=True, metavar="N"
)
@client_options
def ls(*, first: int, identity: Path | None, as_json: bool) -> None:
    """List entries from number N on: when, who, what, to whom."""
    from triplane.cloud.cli.auditing import entry_record, entry_table, read

    with calls(identity) as cloud:
        entries = list(read(cloud, first))
    record = {"entries": [entry_record(entry) for entry in entries]}
    open_output(as_json).result(record, entry_table(entries))


@command.command("verify", short_help="Recompute the chain; nobody rewrote the log.", epilog=EPILOG)
@click.option(
    "--head", metavar="NUMBER:DIGEST",
    help="A head that you kept: the log must still hold that very entry.",
)  # fmt: skip
@client_options
def verify(*, head: str | None, identity: Path | None, as_json: bool) -> None:
    """Recompute the chain from its first entry; prints the head to keep. Exit code 5: broken."""
    from triplane.cloud.cli.auditing import parse_head, verified

    kept = parse_head(head) if head else None
    with calls(identity) as cloud:
        number, digest = verified(cloud, kept)
    text = f"{number} entries, unbroken\nhead to keep: {number}:{digest.hex()}"
    record = {"entries": number, "head": f"{number}:{digest.hex()}", "kept_head_found": bool(head)}
    open_output(as_json).result(record, text)
