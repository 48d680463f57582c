"""Enrol a machine as a device: make a key, get a certificate for a token, store the settings.

The device then also stores the first root of signed metadata that it trusts, as a node does; see
`proto/signed/enrolling.py`.
"""

from pathlib import Path

from triplane.device.home import DeviceHome, DeviceIdentity, DeviceSettings
from triplane.proto.errors import Conflict


def enrol(
    home: DeviceHome,
    settings: DeviceSettings,
    token: str,
    address: str,
    root: Path | None = None,
) -> DeviceIdentity:
    """Make `home` a device of the cloud whose enrolment port is at `address`.

    root: file of the first root, to trust instead of the cloud's own. It can be repeated with the
    same token after an interruption. An enrolled home takes a new token, such as after its
    certificate has expired. Conflict: a process works here, the token is used up, or the home
    belongs to another cloud. Corrupt: the cloud's metadata does not follow from `root`.
    InvalidInput: the token is for another kind of machine. Unavailable: a port does not answer.
    """
    from triplane.proto.identity import Token
    from triplane.proto.signed.enrolling import fetch_root, require_one_cloud

    # A running device would go on with the identity that it has loaded.
    if home.is_held:
        raise Conflict(f"a process works in {home.path}; stop it before it gets a new identity")
    require_one_cloud(home.identity, Token.parse(token), "device")
    home.make()
    _get_certificate(home, token, address)
    # Before the root, which is what completes an enrolment: one that was interrupted later cannot
    # be repeated with the same token.
    home.save_settings(settings)
    fetch_root(home.trust, home.identity, "device", root)
    return home.note_certificate()


def _get_certificate(home: DeviceHome, token: str, address: str) -> None:
    from triplane.proto.identity import enrol as enrol_at

    try:
        enrol_at(token, address, home.identity.path, kind="device")
    except Conflict as error:
        if not home.is_enrolled:
            raise
        # Without a root, an interrupted attempt or an earlier release has used the token: the
        # certificate is here, and only the root is missing.
        if home.has_root:
            raise Conflict(
                f"{error}; {home.path} stays {home.enrolled.name}, enrolled before: "
                f"triplane device run --home {home.path}"
            ) from error
