"""The cloud tier: registry, fleet, federation, identity, trust and dashboard."""

if not __name__.startswith("triplane."):
    raise ImportError("import this package as triplane.cloud, not as a top-level package")
