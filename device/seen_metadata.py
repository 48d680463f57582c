"""Which signed metadata a device has seen, for its offer.

Apart from `signed_plans`, because the process of the session does not import onnxruntime.
"""

import hashlib
import json
import logging

from triplane.device.home import DeviceHome
from triplane.proto import federation_pb2 as pb

logger = logging.getLogger(__name__)


def note_metadata(home: DeviceHome, offer: pb.Offer) -> None:
    """Add to an offer which metadata the device has verified, so that a restored cloud notices.

    The files are the device's own and were verified before they were stored, so they are read as
    plain JSON; nothing is added if one is missing.
    """
    folder = home.trust / "metadata"
    try:
        timestamp = (folder / "timestamp.json").read_bytes()
        versions: dict[str, int] = {}
        for name in ("snapshot.json", "timestamp.json"):
            signed = json.loads((folder / name).read_bytes())["signed"]
            pins = {pin.removesuffix(".json"): m["version"] for pin, m in signed["meta"].items()}
            versions |= pins | {name.removesuffix(".json"): signed["version"]}
        offer.metadata_versions.update(versions)
        offer.metadata_sha256 = hashlib.sha256(timestamp).digest()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.debug("no metadata in the offer", extra={"reason": str(error)})
