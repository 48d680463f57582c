"""`triplane cloud`: start the cloud, let machines and people in, see who is in, throw one out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.cloud.cli.connection import (
    IDENTITY_VARIABLE,
    calls,
    client_options,
    home_option,
)
from triplane.cloud.cli.keys import command as keys_command
from triplane.cloud.cli.options import DURATION, LABEL, SHARE
from triplane.proto.logs import quiet_grpc
from triplane.unified_ir.cli.shell import SECRET, json_option, open_output

if TYPE_CHECKING:
    from triplane.proto.identity_pb2 import CreateTokenResponse, Principal

ROLES: Final = ("viewer", "operator", "signer", "node", "device")
PORT: Final = click.IntRange(0, 65535)
DEFAULT_PORT: Final = 8443
DEFAULT_ENROL_PORT: Final = 8444
DEFAULT_DASHBOARD_PORT: Final = 8445

INIT_EPILOG = """\b
Example, for a cloud that nodes reach as fleet.example.org:
  triplane cloud init --host fleet.example.org --offline-keys /media/usb/triplane-keys

\b
The keys in the offline folder decide what may run on your nodes. Take that folder away from this
machine; bring it back only to a machine you sign on (triplane sign). Without them a stolen cloud
cannot make a node run anything you did not sign. Losing them means enrolling every node again:
keep two copies.
"""

UP_EPILOG = """\b
Example:
  triplane cloud up
  triplane cloud up --json | head -1          the ports that were chosen, for scripts

\b
Three ports: the main one (mutual TLS), one where machines with a token get their certificate, and
the dashboard (only on 127.0.0.1; from elsewhere: ssh -L 8445:127.0.0.1:8445 MACHINE).
SIGTERM or Ctrl-C drains and ends. Killing it at any moment loses nothing that was answered.
"""

LET_IN_EPILOG = """\b
Examples:
  triplane cloud token --role node --name camera-7 --label site=factory
  triplane cloud token --role signer --name alex --valid 2d

\b
A token lets one machine in once. It is shown now and kept nowhere; give it to the machine over a
way you trust. It also pins this cloud's authority, so the machine cannot be lured elsewhere.
Roles: viewer looks; operator also pushes, deploys and lets others in; signer also submits signed
metadata; node runs models; device learns.
"""


POLICY_EPILOG = """\b
Example, with the offline folder plugged in:
  triplane cloud policy set digits --golden held_out.npz --floor 95% --share 10% --keys DIR
  triplane deploy digits@5 --to all --role auto

\b
A model that is trained again every night needs no signature each time, once a person has signed
what is good enough. Each node measures a version on these samples before it serves it. A cloud
that was broken into cannot change the samples, the floor or the share.
"""
KEYS = click.option(
    "--keys", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR", help="The offline folder that `triplane cloud init` wrote.",
)  # fmt: skip


@click.group("cloud")
def command() -> None:
    """Run the cloud: who is in, what is signed, what runs."""


command.add_command(keys_command)


@command.command("init", short_help="Make a cloud, its keys and an operator.", epilog=INIT_EPILOG)
@home_option
@click.option(
    "--host", "hosts", multiple=True, metavar="NAME",
    help="A name or address under which nodes reach this machine; repeatable. The server's "
    "certificate holds them.  [default: localhost and 127.0.0.1]",
)  # fmt: skip
@click.option(
    "--offline-keys", required=True, type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR", help="Where the keys to take away are written; outside of --home.",
)  # fmt: skip
@click.option(
    "--release-keys", type=click.IntRange(1, 16), default=1, show_default=True, metavar="N",
    help="How many people hold a key that releases.",
)  # fmt: skip
@click.option(
    "--release-threshold", type=click.IntRange(1, 16), default=1, show_default=True, metavar="N",
    help="How many of them must sign a version.",
)  # fmt: skip
@json_option
def init(
    *,
    home: Path,
    hosts: tuple[str, ...],
    offline_keys: Path,
    release_keys: int,
    release_threshold: int,
    as_json: bool,
) -> None:
    """Make a cloud: authority, server certificate, operator identity, signing keys, database.

    Refuses a folder that already holds one.
    """
    from triplane.cloud.cli.start import initialize

    signers = (release_threshold, release_keys)
    record, text = initialize(home, hosts, offline_keys, signers)
    open_output(as_json).result(record, text)


@command.command("up", epilog=UP_EPILOG)
@home_option
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")  # noqa: S104 - nodes come from outside
@click.option(
    "--port", type=PORT,
    help="Main port, mutual TLS; 0 takes a free one.  [default: as at the last start, at first "
    f"{DEFAULT_PORT}]",
)  # fmt: skip
@click.option(
    "--enrol-port", type=PORT,
    help=f"Where tokens become certificates.  [default: likewise, at first {DEFAULT_ENROL_PORT}]",
)  # fmt: skip
@click.option(
    "--dashboard-port", type=PORT,
    help=f"The page, on 127.0.0.1.  [default: likewise, at first {DEFAULT_DASHBOARD_PORT}]",
)  # fmt: skip
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="Events on standard error.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the ready line as one JSON object.")
def up(**options: Any) -> None:
    """Run the cloud until SIGTERM or Ctrl-C."""
    quiet_grpc()
    from triplane.cloud.cli.start import run

    run(**options)


@command.command("status", short_help="Whether it answers, what it holds, what is due.")
@client_options
def status(*, identity: Path | None, as_json: bool) -> None:
    """Say whether the cloud answers, as whom it knows you, and what it holds."""
    from triplane.cloud.cli.status import status_of

    with calls(identity) as cloud:
        record, text = status_of(cloud)
    open_output(as_json).result(record, text)


@command.command(
    "token", short_help="Make a one-time token for a machine or person.", epilog=LET_IN_EPILOG
)
@click.option("--role", type=click.Choice(ROLES), default="node", show_default=True)
@click.option("--name", default="", metavar="NAME", help="Who it is for.  [default: made up]")
@click.option(
    "--label", "labels", type=LABEL, multiple=True, metavar="KEY=VALUE",
    help="A label that the node starts with; repeatable.",
)  # fmt: skip
@click.option(
    "--valid", type=DURATION, default="1h", show_default=True, metavar="TIME",
    help="How long the token may wait to be used, at most 30d.",
)  # fmt: skip
@client_options
def token(
    *,
    role: str,
    name: str,
    labels: tuple[tuple[str, str], ...],
    valid: float,
    identity: Path | None,
    as_json: bool,
) -> None:
    """Make a one-time token that lets one machine or person in."""
    from triplane.cloud.cli.text import record
    from triplane.proto.identity_pb2 import CreateTokenRequest, Role

    request = CreateTokenRequest(
        role=Role.Value(role.upper()), name=name, valid_s=valid, labels=dict(labels)
    )
    with calls(identity) as cloud:
        response = cloud.identity.CreateToken(request)
    open_output(as_json).result(record(response), _token_text(response, role))


def _token_text(response: CreateTokenResponse, role: str) -> str:
    from triplane.cloud.cli.text import until

    where = f"--cloud {response.enrol_address or f'HOST:{DEFAULT_ENROL_PORT}'}"
    if role in {"node", "device"}:
        use = f"triplane {'edge' if role == 'node' else role} enrol {response.token} {where}"
    else:
        use = f"triplane cloud enrol {response.token} {where} --identity DIR"
    ends = until(response.expires_s)
    heading = f"For {role} {response.name}, once; ends {ends}. On that machine:"
    return f"{response.token}\n\n{heading}\n  {use}"


@command.command("enrol", short_help="Turn a token into an identity folder, for a person.")
@click.argument("token_text", metavar="TOKEN|@FILE|-", type=SECRET, envvar="TRIPLANE_TOKEN")
@click.option(
    "--cloud", "address", required=True, metavar="HOST:PORT",
    help=f"The cloud's enrolment port, usually {DEFAULT_ENROL_PORT}.",
)  # fmt: skip
@click.option(
    "--identity", "folder", required=True, type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR", help="The identity folder to make; the private key never leaves it.",
)  # fmt: skip
@json_option
def enrol(*, token_text: str, address: str, folder: Path, as_json: bool) -> None:
    """Turn a token into an identity folder, on the machine of a person who calls the cloud.

    Nodes have a command of their own: triplane edge enrol.
    """
    quiet_grpc()
    from triplane.cloud.cli.text import until
    from triplane.proto.identity import enrol as enrol_at

    identity = enrol_at(token_text, address, folder, kind="person")
    text = (
        f"{identity.name}: identity in {folder}, certificate ends {until(identity.expires_s)}\n"
        f"Use it: export {IDENTITY_VARIABLE}={folder}"
    )
    record = {
        "name": identity.name,
        "identity": str(folder),
        "cloud": identity.cloud,
        "expires_s": identity.expires_s,
    }
    open_output(as_json).result(record, text)


@command.command("renew", short_help="Get a new certificate before the old one ends.")
@client_options
def renew(*, identity: Path | None, as_json: bool) -> None:
    """Get a new certificate before the old one ends (30 days). Nodes do so by themselves."""
    from triplane.cloud.cli.connection import identity_path
    from triplane.cloud.cli.text import until
    from triplane.proto.identity import IdentityFolder
    from triplane.proto.identity import renew as renew_at

    renewed = renew_at(IdentityFolder(identity_path(identity)).load())
    text = f"{renewed.name}: certificate ends {until(renewed.expires_s)}"
    open_output(as_json).result({"name": renewed.name, "expires_s": renewed.expires_s}, text)


@command.command("operator", short_help="Make an operator, on the cloud's own machine.")
@click.argument("name")
@home_option
@click.option(
    "--identity", "folder", required=True, type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR", help="The identity folder to make; where it is lost, this replaces it.",
)  # fmt: skip
@json_option
def operator(*, name: str, home: Path, folder: Path, as_json: bool) -> None:
    """Let NAME in as an operator, while the cloud does not run.

    For a cloud that no operator can reach any more: their identities are lost, or have ended. An
    earlier identity of NAME is void from now on. The audit log tells.
    """
    from triplane.cloud.home import Home, admit_operator

    created = admit_operator(Home(home), name, folder)
    text = f"{name}: operator, identity in {created}\nUse it: export {IDENTITY_VARIABLE}={created}"
    open_output(as_json).result({"name": name, "identity": str(created)}, text)


@command.group("policy", short_help="What the cloud may release without a person.")
def policy() -> None:
    """Set what the cloud may release without a person; signed offline, applied by every node."""


@policy.command("show", short_help="Show which models, and within which bounds.")
@client_options
def policy_show(*, identity: Path | None, as_json: bool) -> None:
    """Show which models may be released by themselves, and within which bounds."""
    from triplane.cloud.cli.policies import shown

    with calls(identity) as cloud:
        record, text = shown(cloud)
    open_output(as_json).result(record, text)


@policy.command(
    "set", short_help="Let the cloud release MODEL, within bounds.", epilog=POLICY_EPILOG
)
@click.argument("model")
@click.option(
    "--golden", required=True, metavar="FILE.npz",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Labelled samples (x and y) on which every node measures a version.",
)  # fmt: skip
@click.option(
    "--floor", required=True, type=SHARE, metavar="SHARE",
    help="The least accuracy on them, as 95%; below it a node refuses.",
)  # fmt: skip
@click.option(
    "--share", type=SHARE, default="100%", show_default=True, metavar="SHARE",
    help="Of the nodes, which ever take a version that no person released.",
)  # fmt: skip
@KEYS
@client_options
def policy_set(
    *,
    model: str,
    golden: Path,
    floor: float,
    share: float,
    keys: Path,
    identity: Path | None,
    as_json: bool,
) -> None:
    """Let the cloud release MODEL by itself, within bounds that nodes apply."""
    from triplane.cloud.cli.policies import allow

    output = open_output(as_json)
    with calls(identity) as cloud:
        record, text = allow(
            cloud, output, model=model, golden=golden, floor=floor, share=share, keys=keys
        )
    output.result(record, text)


@policy.command("remove")
@click.argument("model")
@KEYS
@client_options
def policy_remove(*, model: str, keys: Path, identity: Path | None, as_json: bool) -> None:
    """Let MODEL be released by people only."""
    from triplane.cloud.cli.policies import forbid

    with calls(identity) as cloud:
        record, text = forbid(cloud, model=model, keys=keys)
    open_output(as_json).result(record, text)


@command.command("revoke", short_help="Throw a name out, now.")
@click.argument("name")
@click.option("--reason", default="", metavar="TEXT", help="For the audit log.")
@client_options
def revoke(*, name: str, reason: str, identity: Path | None, as_json: bool) -> None:
    """Throw NAME out: from the answer on no certificate of it is served, its streams are closed.

    A node keeps serving what it has; it gets nothing new. A new token lets the name in again.
    """
    from triplane.cloud.cli.text import record
    from triplane.proto.identity_pb2 import RevokeRequest

    with calls(identity) as cloud:
        out = cloud.identity.Revoke(RevokeRequest(name=name, reason=reason))
    open_output(as_json).result(record(out), f"{out.name}: revoked")


@command.command("who", short_help="List who was let in, with role and certificate.")
@client_options
def who(*, identity: Path | None, as_json: bool) -> None:
    """List everyone who was let in, with role and the end of the certificate."""
    from triplane.cloud.cli.text import record, table
    from triplane.proto.identity_pb2 import ListPrincipalsRequest

    with calls(identity) as cloud:
        principals = cloud.identity.ListPrincipals(ListPrincipalsRequest()).principals
    text = table(("NAME", "ROLE", "ENROLLED", "CERTIFICATE"), [_who_row(p) for p in principals])
    open_output(as_json).result({"principals": [record(p) for p in principals]}, text)


def _who_row(principal: Principal) -> tuple[str, str, str, str]:
    from triplane.cloud.cli.text import age, enum_text, until

    ends = "revoked" if principal.revoked else f"ends {until(principal.expires_s)}"
    if not principal.serial and not principal.revoked:
        ends = "token not used yet"
    role = enum_text(principal, "role")
    return principal.name, role, age(principal.enrolled_s), ends
