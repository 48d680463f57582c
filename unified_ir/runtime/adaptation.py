"""Adapt a bundle to a node's own samples; the result is served like any other bundle.

The steps run on onnxruntime alone. The result is a bundle of the same model and version with other
weights and golden outputs of its own, so that its readers can check it like any bundle.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.runtime.bundle import Bundle, BundleSpec, write_bundle
from triplane.unified_ir.runtime.session import DEFAULT_OPTIONS, Session, SessionOptions
from triplane.unified_ir.runtime.signature import Array, next_name


def adapted_weights(
    bundle: Bundle, batch: Mapping[str, Array], *, options: SessionOptions = DEFAULT_OPTIONS
) -> dict[str, Array]:
    """Return the weights after the bundle's own number of steps on `batch`.

    batch: the inputs of `adapt.onnx` beside the weights, such as x (N, ...) and y (N,).
    InvalidInput: the bundle has no graph of adaptation, or the batch does not fit. Corrupt: the
    steps change no weight, or give numbers that are not finite.
    """
    graph = bundle.adapt
    if graph is None:
        raise InvalidInput(f"bundle {bundle.name} {bundle.version} has no graph of adaptation")
    weights = {name: np.asarray(tensor.data) for name, tensor in bundle.weights.items()}
    session = Session(graph, options=options)
    inputs, outputs = ({t.name for t in side} for side in (session.inputs, session.outputs))
    changed = {name for name in weights if next_name(name) in outputs}
    if not changed:
        raise Corrupt(f"bundle {bundle.name} {bundle.version}: its adaptation changes no weight")
    # Weights that the graph of adaptation does not read are served unchanged.
    loop = session.loop({name: weights[name] for name in weights.keys() & inputs})
    for _ in range(bundle.description.adapt_steps):
        loop.step(**batch)
    # Copies, so that the result does not depend on the buffers of the loop.
    adapted = {**weights, **{name: array.copy() for name, array in loop.state().items()}}
    bad = sorted(name for name in changed if not np.isfinite(adapted[name]).all())
    if bad:
        raise Corrupt(
            f"adaptation made {bad[0]!r} infinite or not a number; the samples may be of another "
            "scale than the model was trained on"
        )
    return adapted


def batch_names(bundle: Bundle) -> tuple[str, ...]:
    """Return the inputs of `adapt.onnx` beside the weights."""
    if bundle.adapt is None:
        return ()
    session = Session(bundle.adapt)
    return tuple(tensor.name for tensor in session.inputs if tensor.name not in bundle.weights)


def write_adapted(bundle: Bundle, weights: Mapping[str, Array], path: Path) -> str:
    """Write the bundle with other weights, atomically; return its root digest.

    Golden outputs are computed here with the new weights, to check what is loaded later.
    """
    spec = BundleSpec(
        description=bundle.description,
        model=bundle.model,
        weights=weights,
        golden_inputs=bundle.golden_inputs,
        # The goldens of the model itself no longer hold: the weights have changed.
        golden_outputs=Session(bundle.model, weights=weights).run(bundle.golden_inputs),
        report={"adapted_from": bundle.digest},
        adapt=bundle.adapt,
    )
    return write_bundle(path, spec)
