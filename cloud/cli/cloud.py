"""`triplane cloud`: create and run the cloud, enrol machines and people, revoke them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.cloud.cli.connection import (
    IDENTITY_VARIABLE,
    Answer,
    Calls,
    calls_cloud,
    client_options,
    home_option,
    print_answer,
)
from triplane.cloud.cli.keys import command as keys_command
from triplane.cloud.cli.options import DURATION, LABEL, SHARE, example, keys_option, least_option
from triplane.cloud.cli.roster import command as roster_command
from triplane.proto.logs import quiet_grpc
from triplane.unified_ir.cli.shell import SECRET, json_option, open_output

if TYPE_CHECKING:
    from triplane.proto.identity_pb2 import CreateTokenRequest, CreateTokenResponse, Principal

ROLES: Final = ("viewer", "operator", "signer", "node", "device")
PORT: Final = click.IntRange(0, 65535)
DEFAULT_PORT: Final = 8443
DEFAULT_ENROL_PORT: Final = 8444
DEFAULT_DASHBOARD_PORT: Final = 8445

INIT_EPILOG = """\b
Example, for a cloud that nodes reach as fleet.example.org:
  triplane cloud init --host fleet.example.org --offline-keys /media/usb/triplane-keys

\b
The keys in the offline folder decide what may run on your nodes. Remove that folder from this
machine, and bring it back only to a machine on which you sign (triplane sign). Without these keys
an intruder in the cloud cannot make a node run anything that you did not sign. If they are lost,
every node must be enrolled again, so keep two copies.
"""

UP_EPILOG = """\b
Examples:
  triplane cloud up
  triplane cloud up --json > ready.json &       for scripts: one line, with the chosen ports,
  until [ -s ready.json ]; do sleep 0.1; done   once calls are answered

\b
The cloud listens on three ports: the main one (mutual TLS), one where machines exchange a token for
a certificate, and the dashboard (only on 127.0.0.1; from another machine, forward the port with
ssh -L 8445:127.0.0.1:8445 MACHINE). SIGTERM or Ctrl-C lets running calls finish, then stops.
Killing the process at any moment loses nothing that was acknowledged.
"""

INVITE_EPILOG = """\b
Examples:
  triplane cloud token --role node --name camera-7 --label site=factory
  triplane cloud token --role signer --name alex --valid 2d

\b
A token enrols one machine or person, once. It is printed now and cannot be shown again; transfer
it over a channel that you trust. It contains the fingerprint of this cloud's certificate authority,
so that the machine cannot enrol with an impostor.
Roles: a viewer reads; an operator also pushes, deploys and creates tokens; a signer reads and
submits signed metadata; a node serves models; a device trains.
"""

POLICY_EPILOG = """\b
Example, with the offline folder plugged in:
  triplane cloud policy set digits --golden held_out.npz --floor 95% --share 10% --keys DIR
  triplane deploy digits@5 --to all --role auto

\b
A model that is retrained every night needs no signature for each version once a person has signed
what is good enough. Each node measures a version on these samples before it serves it. An intruder
in the cloud cannot change the samples, the floor or the share.
"""


PLANS_EPILOG = """\b
Examples, with the offline folder plugged in:
  triplane cloud policy set-plans digits --keys DIR
  triplane cloud policy set-plans digits --algorithm fedavg --least-devices 10 --keys DIR
  triplane cloud policy set-plans digits --tensors '*.weight' --tensors '*.bias' --keys DIR

\b
Devices run no plan without a signature. Under this policy the cloud's own key signs the plans of
runs of MODEL, and no person needs to sign each (triplane federate sign). An intruder in the cloud
can sign as well, but cannot change the policy: choose the tensors and the sizes accordingly.
"""


@click.group("cloud")
def command() -> None:
    """Create and run the cloud; manage its users, keys and release policy."""


command.add_command(keys_command)
command.add_command(roster_command)


@command.command("init", epilog=INIT_EPILOG)
@home_option
@click.option(
    "--host", "hosts", multiple=True, metavar="NAME",
    help="A host name or address by which nodes reach this machine; repeatable. The server's "
    "certificate contains them.  [default: localhost and 127.0.0.1]",
)  # fmt: skip
@click.option(
    "--offline-keys", required=True, type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR", help="Folder for the keys to take away from this machine; outside of --home.",
)  # fmt: skip
@click.option(
    "--release-keys", type=click.IntRange(1, 16), default=1, show_default=True, metavar="N",
    help="Number of release keys, one for each person who signs versions.",
)  # fmt: skip
@click.option(
    "--release-threshold", type=click.IntRange(1, 16), default=1, show_default=True, metavar="N",
    help="Number of these people who must sign a version.",
)  # fmt: skip
@json_option
def init(*, as_json: bool, **options: Any) -> None:
    """Create a cloud, its keys and an operator.

    Makes the certificate authority, the server certificate, an operator's identity, the signing
    keys and the database. A folder that already contains a cloud is refused.
    """
    # Imports are inside the functions, here and in all verbs: `triplane --help` must not load grpc
    # or SQLAlchemy.
    from triplane.cloud.cli.start import initialize

    open_output(as_json).result(*initialize(**options))


@command.command("up", epilog=UP_EPILOG)
@home_option
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")  # noqa: S104 - nodes come from outside
@click.option(
    "--port", type=PORT,
    help="Main port, with mutual TLS; 0 chooses a free port.  [default: that of the last start, "
    f"or {DEFAULT_PORT}]",
)  # fmt: skip
@click.option(
    "--enrol-port", type=PORT,
    help="Port where tokens are exchanged for certificates.  [default: that of the last start, "
    f"or {DEFAULT_ENROL_PORT}]",
)  # fmt: skip
@click.option(
    "--dashboard-port", type=PORT,
    help="Port of the dashboard, on 127.0.0.1.  [default: that of the last start, "
    f"or {DEFAULT_DASHBOARD_PORT}]",
)  # fmt: skip
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="warning",
    show_default=True, help="Least severe level that is logged to standard error.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the ready line as one JSON object.")
def up(**options: Any) -> None:
    """Run the cloud until SIGTERM or Ctrl-C."""
    # Before grpc is imported, because it reads its environment variable only then.
    quiet_grpc()
    from triplane.cloud.cli.start import run

    run(**options)


@command.command("status", epilog=example("cloud status --json"))
@calls_cloud
def status(cloud: Calls) -> Answer:
    """Show your role, what the cloud holds, and what is due.

    Warnings name signatures that expire soon and nodes that need attention.
    """
    from triplane.cloud.cli.status import status_of

    return status_of(cloud)


@command.command("token", epilog=INVITE_EPILOG)
@click.option("--role", type=click.Choice(ROLES), default="node", show_default=True)
@click.option(
    "--name", default="", metavar="NAME",
    help="Name of the machine or person.  [default, for a machine: a random one]",
)  # fmt: skip
@click.option(
    "--label", "labels", type=LABEL, multiple=True, metavar="KEY=VALUE",
    help="A label that the node gets when it enrols; repeatable.",
)  # fmt: skip
@click.option(
    "--valid", "valid_s", type=DURATION, default="1h", show_default=True, metavar="TIME",
    help="Time until the token expires, at most 30d.",
)  # fmt: skip
@client_options
def token(
    *, role: str, name: str, labels: tuple[tuple[str, str], ...], valid_s: float, **options: Any
) -> None:
    """Create a one-time token for a machine or a person."""
    from triplane.proto.identity_pb2 import CreateTokenRequest, Role

    request = CreateTokenRequest(
        role=Role.Value(role.upper()), name=name, valid_s=valid_s, labels=dict(labels)
    )
    print_answer(_create_token, request=request, role=role, **options)


def _create_token(cloud: Calls, *, request: CreateTokenRequest, role: str) -> Answer:
    response = cloud.identity.CreateToken(request)
    return response, _token_text(response, role)


def _token_text(response: CreateTokenResponse, role: str) -> str:
    from triplane.cloud.cli.text import expiry_text

    where = f"--cloud {response.enrol_address or f'HOST:{DEFAULT_ENROL_PORT}'}"
    if role in {"node", "device"}:
        use = f"triplane {'edge' if role == 'node' else role} enrol - {where}"
    else:
        use = f"triplane cloud enrol - {where} --identity DIR"
    ends = expiry_text(response.expires_s)
    heading = f"One use, for the {role} {response.name}; {ends}."
    # Not on the command line, which every user of that machine can see.
    return f"{response.token}\n\n{heading} On that machine, run this and paste it:\n  {use}"


@command.command(
    "enrol",
    epilog=example("cloud enrol @token.txt --cloud fleet.example.org:8444 --identity ~/alex"),
)
@click.argument("token_text", metavar="TOKEN|@FILE|-", type=SECRET, envvar="TRIPLANE_TOKEN")
@click.option(
    "--cloud", "address", required=True, metavar="HOST:PORT",
    help=f"The cloud's enrolment port, usually {DEFAULT_ENROL_PORT}.",
)  # fmt: skip
@click.option(
    "--identity", "folder", required=True, type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR", help="Identity folder to create; the private key never leaves it.",
)  # fmt: skip
@json_option
def enrol(*, token_text: str, address: str, folder: Path, as_json: bool) -> None:
    """Exchange a person's token for an identity folder.

    Run it on the machine from which that person calls the cloud. TOKEN is the token itself, @FILE
    reads it from a file, and - reads it from standard input.

    Nodes enrol with triplane edge enrol, devices with triplane device enrol.
    """
    quiet_grpc()
    from triplane.cloud.cli.text import expiry_text
    from triplane.proto.identity import enrol as enrol_at

    identity = enrol_at(token_text, address, folder, kind="person")
    text = (
        f"{identity.name}: identity in {folder}, certificate {expiry_text(identity.expires_s)}\n"
        f"Use it: export {IDENTITY_VARIABLE}={folder}"
    )
    record = {
        "name": identity.name,
        "identity": str(folder),
        "cloud": identity.cloud,
        "expires_s": identity.expires_s,
    }
    open_output(as_json).result(record, text)


@command.command("renew", epilog=example("cloud renew --identity ~/alex"))
@client_options
def renew(*, identity: Path | None, as_json: bool) -> None:
    """Get a new certificate before the old one expires.

    A certificate is valid for 30 days. Commands renew it by themselves in its last third, and so do
    nodes and devices; this is for an identity that is seldom used.
    """
    from triplane.cloud.cli.connection import identity_path
    from triplane.cloud.cli.text import expiry_text
    from triplane.proto.identity import IdentityFolder
    from triplane.proto.identity import renew as renew_at

    renewed = renew_at(IdentityFolder(identity_path(identity)).load())
    text = f"{renewed.name}: certificate {expiry_text(renewed.expires_s)}"
    open_output(as_json).result({"name": renewed.name, "expires_s": renewed.expires_s}, text)


@command.command("operator", epilog=example("cloud operator alex --identity ~/alex"))
@click.argument("name")
@home_option
@click.option(
    "--identity", "folder", required=True, type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR", help="Identity folder to create, or to replace if it was lost.",
)  # fmt: skip
@json_option
def operator(*, name: str, home: Path, folder: Path, as_json: bool) -> None:
    """Create an operator on the cloud's own machine.

    Use it while the cloud is stopped, when no operator can reach it any more because their
    identities are lost or have expired. An earlier identity of NAME becomes invalid, and the audit
    log records the change.
    """
    from triplane.cloud.home import Home, admit_operator

    created = admit_operator(Home(home), name, folder)
    text = f"{name}: operator, identity in {created}\nUse it: export {IDENTITY_VARIABLE}={created}"
    open_output(as_json).result({"name": name, "identity": str(created)}, text)


@command.group("policy")
def policy() -> None:
    """Set what the cloud may release and sign without a person.

    The policies are signed offline. Every node applies the one for releases, every device the one
    for plans.
    """


@policy.command("show", epilog=example("cloud policy show"))
@calls_cloud
def policy_show(cloud: Calls) -> Answer:
    """Show the models that may be released automatically.

    Each is listed with its share of nodes and the accuracy that it must reach. Below them are the
    models whose plans the cloud may sign, with the smallest round and the tensors that may leave.
    """
    from triplane.cloud.cli.policies import describe_policy

    return describe_policy(cloud)


@policy.command("set", epilog=POLICY_EPILOG)
@click.argument("model")
@click.option(
    "--golden", required=True, metavar="FILE.npz",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Labelled samples (x and y) on which every node measures a version.",
)  # fmt: skip
@click.option(
    "--floor", required=True, type=SHARE, metavar="SHARE",
    help="Least accuracy on these samples, such as 95%; a node refuses a version below it.",
)  # fmt: skip
@click.option(
    "--share", type=SHARE, default="100%", show_default=True, metavar="SHARE",
    help="Share of the nodes that accept versions that no person released.",
)  # fmt: skip
@keys_option()
@calls_cloud
def policy_set(cloud: Calls, **options: Any) -> Answer:
    """Let the cloud release MODEL by itself, within bounds.

    Nodes enforce these bounds themselves.
    """
    from triplane.cloud.cli.policies import allow

    return allow(cloud, **options)


@policy.command(
    "remove", epilog=example("cloud policy remove digits --keys /media/usb/triplane-keys")
)
@click.argument("model")
@keys_option()
@calls_cloud
def policy_remove(cloud: Calls, *, model: str, keys: Path) -> Answer:
    """Let only people release MODEL."""
    from triplane.cloud.cli.policies import forbid

    return forbid(cloud, model=model, keys=keys)


@policy.command("set-plans", epilog=PLANS_EPILOG)
@click.argument("model", metavar="MODEL[@VERSION|@ALIAS]")
@click.option(
    "--algorithm", "algorithms", multiple=True, metavar="PATTERN",
    help="Algorithms that the plans may have, such as fedavg or maml*; repeatable.  "
    "[default: all]",
)  # fmt: skip
@click.option(
    "--tensors", multiple=True, metavar="PATTERN",
    help="Names of tensors that may leave a device, * for any characters; repeatable.  "
    "[default: of the version, its parameters and the statistics of batch normalization]",
)  # fmt: skip
@least_option("devices", "Fewest updates of which a round computes the next state.", 2)
@least_option("batch", "Fewest samples in a step of a device.", 2)
@least_option("steps", "Fewest steps of a device in a round.", 1)
@least_option("held-out", "Fewest held-out samples of a device in a score.", 1)
@click.option(
    "--masked", type=float, metavar="SHARE",
    help="Updates leave a device only in masked rounds, which hold while at most this share of "
    "their devices colludes with the cloud, such as 0 or 0.1.  [default: also in the clear]",
)  # fmt: skip
@click.option(
    "--roster", is_flag=True,
    help="Devices take part only while they know a signed roster of devices; needs --masked.",
)  # fmt: skip
@keys_option()
@calls_cloud
def policy_set_plans(cloud: Calls, **options: Any) -> Answer:
    """Let the cloud sign plans of MODEL by itself, within bounds.

    Plans are what devices run in federated learning.
    Devices enforce these bounds themselves.
    """
    from triplane.cloud.cli.plan_policies import allow_plans

    return allow_plans(cloud, **options)


@policy.command(
    "remove-plans",
    epilog=example("cloud policy remove-plans digits --keys /media/usb/triplane-keys"),
)
@click.argument("model")
@keys_option()
@calls_cloud
def policy_remove_plans(cloud: Calls, *, model: str, keys: Path) -> Answer:
    """Let only people sign training plans of MODEL."""
    from triplane.cloud.cli.plan_policies import forbid_plans

    return forbid_plans(cloud, model=model, keys=keys)


@command.command("revoke", epilog=example("cloud revoke camera-7 --reason stolen"))
@click.argument("name")
@click.option("--reason", default="", metavar="TEXT", help="Recorded in the audit log.")
@calls_cloud
def revoke(cloud: Calls, *, name: str, reason: str) -> Answer:
    """Revoke the certificates of NAME at once.

    Once this call returns, its certificates are rejected and its streams are closed. A node keeps
    serving its versions and gets no new ones. A new token admits the name again.
    """
    from triplane.proto.identity_pb2 import RevokeRequest

    principal = cloud.identity.Revoke(RevokeRequest(name=name, reason=reason))
    return principal, f"{principal.name}: revoked"


@command.command("who", epilog=example("cloud who"))
@calls_cloud
def who(cloud: Calls) -> Answer:
    """List all users and machines, with role and certificate."""
    from triplane.cloud.cli.text import table
    from triplane.proto.identity_pb2 import ListPrincipalsRequest

    principals = cloud.identity.ListPrincipals(ListPrincipalsRequest()).principals
    text = table(("NAME", "ROLE", "ENROLLED", "CERTIFICATE"), [_who_row(p) for p in principals])
    return {"principals": principals}, text


def _who_row(principal: Principal) -> tuple[str, str, str, str]:
    from triplane.cloud.cli.text import age, enum_text, expiry_text

    ends = "revoked" if principal.revoked else expiry_text(principal.expires_s)
    if not principal.serial and not principal.revoked:
        ends = "token not used yet"
    role = enum_text(principal, "role")
    return principal.name, role, age(principal.enrolled_s), ends
