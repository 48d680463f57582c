"""`python -m triplane.device.verifying HOME DIGEST`: say whether a device may run a plan.

It prints the signed target as JSON, or why there is none, and exits. It is a process of its own
for the same reason as `renewing.py`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from triplane.device.home import DeviceHome, DeviceSettings
from triplane.device.signed_plans import verified_here
from triplane.proto.channels import connect
from triplane.proto.errors import TriplaneError, Unavailable
from triplane.proto.logs import exit_on_error, quiet_grpc


def answer(home: DeviceHome, digest: str, settings: DeviceSettings) -> dict[str, Any]:
    """Return the target's fields, or `refused` or `unavailable` with the reason."""
    try:
        with connect(home.identity) as channel:
            target = verified_here(home, lambda: channel, settings)(digest)
    except Unavailable as error:
        return {"unavailable": str(error)}
    except TriplaneError as error:
        return {"refused": str(error)}
    hashes = {"sha256": target.sha256.hex()}
    return {
        "path": target.path,
        "length": target.length,
        "hashes": hashes,
        "custom": dict(target.custom),
    }


def _command() -> None:
    parser = argparse.ArgumentParser(prog="python -m triplane.device.verifying")
    parser.add_argument("home", type=Path)
    parser.add_argument("digest")
    parser.add_argument("--by-people", action="store_true")
    parser.add_argument("--roster-required", action="store_true")
    options = parser.parse_args()
    quiet_grpc()
    home = DeviceHome(options.home)
    settings = DeviceSettings(
        plans_by_people=options.by_people, roster_required=options.roster_required
    )
    sys.stdout.write(json.dumps(answer(home, options.digest, settings)))


if __name__ == "__main__":
    exit_on_error("verifying", _command)
