"""Registry values to and from the messages of `registry.proto`."""

from dataclasses import asdict
from typing import Final

from triplane.cloud.registry.values import (
    BundleRecord,
    ConversionRecipe,
    Lineage,
    Model,
    Needs,
    Push,
    State,
    Version,
)
from triplane.proto import registry_pb2 as pb

_STATES: Final = {
    State.CONVERTING: pb.Bundle.CONVERTING,
    State.READY: pb.Bundle.READY,
    State.FAILED: pb.Bundle.FAILED,
}


def push(message: pb.PushRequest) -> Push:
    """Decode a push; InvalidInput where it breaks a rule of `registry.proto`."""
    recipe, lineage = message.recipe, message.lineage
    return Push(
        model=message.model,
        blob=message.blob,
        key=message.key,
        aliases=tuple(message.aliases),
        recipe=ConversionRecipe(
            quantize=recipe.quantize,
            calibration=recipe.calibration,
            entry=recipe.entry or ConversionRecipe().entry,
            max_accuracy_drop=recipe.max_accuracy_drop,
            evaluation=recipe.evaluation,
        ),
        lineage=Lineage(
            parent=lineage.parent, source=lineage.source or Lineage().source, note=lineage.note
        ),
    )


def model(value: Model) -> pb.Model:
    """A model with its aliases."""
    aliases = [pb.Alias(name=name, version=version) for name, version in value.aliases]
    return pb.Model(name=value.name, versions=value.latest, latest=value.latest, aliases=aliases)


def version(value: Version) -> pb.Version:
    """A version with its bundles."""
    return pb.Version(
        model=value.model,
        version=value.version,
        model_digest=value.model_digest,
        blob=value.blob,
        size=value.size,
        created_s=value.created_s,
        created_by=value.created_by,
        aliases=value.aliases,
        recipe=pb.Recipe(**asdict(value.recipe)),
        lineage=pb.Lineage(**asdict(value.lineage)),
        bundles=[bundle(row) for row in value.bundles],
    )


def bundle(value: BundleRecord) -> pb.Bundle:
    """Encode a bundle in its current state."""
    return pb.Bundle(
        model=value.model,
        version=value.version,
        target=value.target,
        state=_STATES[value.state],
        reason=value.reason,
        blob=value.blob,
        size=value.size,
        root_digest=value.root_digest,
        content_digest=value.content_digest,
        signed_path=value.signed_path,
        needs=needs(value.needs),
    )


def needs(value: Needs) -> pb.Needs:
    """Requirements on a node, as a message."""
    return pb.Needs(**asdict(value))
