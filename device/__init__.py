"""The device tier: the federated client (not built yet)."""

if not __name__.startswith("triplane."):
    raise ImportError("import this package as triplane.device, not as a top-level package")
