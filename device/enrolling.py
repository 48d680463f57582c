"""Enrol a machine as a device: make a key, get a certificate for a token, store the settings."""

from triplane.device.home import DeviceHome, DeviceIdentity, DeviceSettings
from triplane.proto.errors import Conflict


def enrol(home: DeviceHome, settings: DeviceSettings, token: str, address: str) -> DeviceIdentity:
    """Make `home` a device of the cloud whose enrolment port is at `address`.

    It can be repeated with the same token after an interruption. An enrolled home takes a new
    token, such as after its certificate has expired. Conflict: a process works here, or the token
    is used up. InvalidInput: the token is for another kind of machine. Unavailable: no enrolment
    port answers.
    """
    from triplane.proto.identity import enrol as enrol_at

    # A running device would go on with the identity that it has loaded.
    if home.is_held:
        raise Conflict(f"a process works in {home.path}; stop it before it gets a new identity")
    home.make()
    try:
        enrol_at(token, address, home.identity.path, kind="device")
    except Conflict as error:
        if not home.is_enrolled:
            raise
        raise Conflict(
            f"{error}; {home.path} stays {home.enrolled.name}, enrolled before: "
            f"triplane device run --home {home.path}"
        ) from error
    home.save_settings(settings)
    return home.note_certificate()
