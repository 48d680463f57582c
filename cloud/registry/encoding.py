"""Registry values to and from the messages of `registry.proto`."""

from triplane.cloud.registry.values import (
    BundleRecord,
    ConversionRecipe,
    Lineage,
    Model,
    Push,
    Version,
)
from triplane.proto import registry_pb2 as pb
from triplane.proto.messages import message_from, value_from


def push(message: pb.PushRequest) -> Push:
    """Decode a push. InvalidInput: it breaks a rule of `registry.proto`."""
    return value_from(
        Push,
        message,
        aliases=tuple(message.aliases),
        recipe=recipe(message.recipe),
        lineage=value_from(
            Lineage, message.lineage, source=message.lineage.source or Lineage().source
        ),
    )


def recipe(message: pb.Recipe) -> ConversionRecipe:
    """Decode a recipe. InvalidInput."""
    return value_from(ConversionRecipe, message, entry=message.entry or ConversionRecipe().entry)


def push_request(value: Push) -> pb.PushRequest:
    """Encode a push."""
    return message_from(
        pb.PushRequest,
        value,
        recipe=message_from(pb.Recipe, value.recipe),
        lineage=message_from(pb.Lineage, value.lineage),
    )


def model(value: Model) -> pb.Model:
    """Encode a model with its aliases."""
    aliases = [pb.Alias(name=name, version=version) for name, version in value.aliases]
    return message_from(pb.Model, value, versions=value.latest, aliases=aliases)


def version(value: Version) -> pb.Version:
    """Encode a version with its bundles."""
    return message_from(
        pb.Version,
        value,
        recipe=message_from(pb.Recipe, value.recipe),
        lineage=message_from(pb.Lineage, value.lineage),
        bundles=[bundle(record) for record in value.bundles],
    )


def bundle(value: BundleRecord) -> pb.Bundle:
    """Encode a bundle in its current state."""
    state = pb.Bundle.State.Value(value.state.name)
    return message_from(pb.Bundle, value, state=state, needs=message_from(pb.Needs, value.needs))
