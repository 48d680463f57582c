"""Bundles as servables, which are verified, loaded and checked by their own goldens first."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from triplane.edge.serving.servable import Array, ServableTensor
from triplane.unified_ir.runtime.bundle import Bundle
from triplane.unified_ir.runtime.session import (
    DEFAULT_OPTIONS,
    CancellationToken,
    Session,
    SessionOptions,
)


class BundleServable:
    """A `Servable` for a bundle's session; the file is no longer mapped after the load."""

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
    path: Path, *, options: SessionOptions = DEFAULT_OPTIONS, expected_digest: str | None = None
) -> BundleServable:
    """Load the bundle at `path` with these settings of onnxruntime.

    Corrupt names the damaged part, or a golden with another result. InvalidInput: this runtime
    cannot run it. Unavailable: the device is not. NotFound.
    """
    bundle = Bundle.load(path, expected_digest=expected_digest)
    session = bundle.session(options)
    bundle.check_goldens(session)
    return BundleServable(bundle, session)
