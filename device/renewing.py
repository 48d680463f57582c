"""`python -m triplane.device.renewing HOME`: renew the certificate of a device's home, then exit.

The certificate is for the same key as before, by which other devices know this one. It is a process
of its own because cryptography takes 11 MB, which a device could not free again.
"""

import sys

from triplane.device.home import DeviceHome
from triplane.proto.identity import private_key, renew
from triplane.proto.logs import exit_on_error


def main(path: str) -> None:
    """Renew the certificate, and store when to renew it again."""
    home = DeviceHome(path)
    # The same key: a roster of devices lists it, and people sign that.
    renew(home.identity, key=private_key(home.identity))
    home.note_certificate()


if __name__ == "__main__":
    exit_on_error("renewing", lambda: main(sys.argv[1]))
