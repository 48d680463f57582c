"""The edge tier: the supervisor of a node, its agent and its inference server."""

if not __name__.startswith("triplane."):
    raise ImportError("import this package as triplane.edge, not as a top-level package")
