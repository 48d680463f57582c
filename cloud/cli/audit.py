"""`triplane audit`: read the audit log, and verify that it was not rewritten."""

from __future__ import annotations

import click

from triplane.cloud.cli.connection import Answer, Calls, calls_cloud
from triplane.cloud.cli.options import MAX_NUMBER, example

EPILOG = """\b
Examples:
  triplane audit verify
  triplane audit verify --head 118:5f0c...e2      the head that you noted last time

\b
Every entry contains the digest of the one before it, so a changed, removed or inserted entry breaks
the chain. An intruder in the cloud could rewrite the whole chain; only a head that you keep
elsewhere shows that. Note the head that this command prints, and pass it next time.
"""


@click.group("audit")
def command() -> None:
    """Read and verify the log of who changed what."""


@command.command("ls", epilog=example("audit ls --from 100"))
@click.option(
    "--from", "first", type=click.IntRange(1, MAX_NUMBER), default=1, show_default=True,
    metavar="N", help="Number of the first entry to print.",
)  # fmt: skip
@calls_cloud
def ls(cloud: Calls, *, first: int) -> Answer:
    """List entries: when, who, what, to whom."""
    from triplane.cloud.cli.auditing import entry_record, entry_table, read

    entries = list(read(cloud, first))
    text = entry_table(entries) if entries else f"no entry from number {first} on"
    return {"entries": [entry_record(entry) for entry in entries]}, text


@command.command("verify", epilog=EPILOG)
@click.option(
    "--head", metavar="NUMBER:DIGEST",
    help="A head that you kept; the log must still contain exactly that entry.",
)  # fmt: skip
@calls_cloud
def verify(cloud: Calls, *, head: str | None) -> Answer:
    """Recompute the chain of digests, to detect changes.

    Prints the head to keep. The exit code is 5 if the chain is broken.
    """
    from triplane.cloud.cli.auditing import parse_head, verify_log

    number, digest = verify_log(cloud, parse_head(head) if head else None)
    text = f"{number} entries, unbroken\nhead to keep: {number}:{digest.hex()}"
    # `verify_log` raises unless the kept head was found, so it was found if one was given.
    record = {"entries": number, "head": f"{number}:{digest.hex()}", "kept_head_found": bool(head)}
    return record, text
