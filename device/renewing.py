"""`python -m triplane.device.renewing HOME`: renew the certificate of a device's home, and end.

It is a separate process, because cryptography takes 11 MB that a device would not get back.
"""

import sys

from triplane.device.home import DeviceHome
from triplane.proto.errors import TriplaneError
from triplane.proto.identity import renew


def main(path: str) -> None:
    """Renew, and note when to renew again."""
    home = DeviceHome(path)
    renew(home.identity)
    home.note_certificate()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except TriplaneError as error:
        sys.exit(f"renewing: {error}")
