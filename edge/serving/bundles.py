"""A bundle as a servable: verified, loaded and held to its own goldens before anyone asks it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from triplane.edge.serving.servable import Array, ServableTensor
from triplane.unified_ir.runtime.bundle import Bundle
from triplane.unified_ir.runtime.session import CancellationToken, Session, SessionOptions


class BundleServable:
    """A `Servable` over a bundle's session; the mapped file is let go once it is loaded."""

    def __init__(self, bundle: Bundle, session: Session) -> None:
        description = bundle.description
        self.name = description.name
        self.version = description.version
        self.digest = bundle.digest
        self.labels: Mapping[str, Sequence[str]] = description.labels
        self.inputs: Sequence[ServableTensor] = session.inputs
        self.outputs: Sequence[ServableTensor] = session.outputs
        self._session = session

    def run(
        self, feeds: Mapping[str, Array], *, stop: CancellationToken | None = None
    ) -> dict[str, Array]:
        """See `Servable`."""
        return self._session.run(feeds, stop=stop)


def open_bundle(
    path: Path, *, threads: int = 1, expected_digest: str | None = None
) -> BundleServable:
    """Load the bundle at `path` for runs of `threads` threads each.

    Raises Corrupt naming the damaged part, or when the goldens do not come out; InvalidInput when
    this runtime cannot run it; NotFound.
    """
    bundle = Bundle.load(path, expected_digest=expected_digest)
    session = bundle.session(SessionOptions(threads=threads))
    bundle.check_goldens(session)
    return BundleServable(bundle, session)
