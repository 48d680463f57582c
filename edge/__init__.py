"""The edge tier: the inference server; later the node agent and its supervisor."""

if not __name__.startswith("triplane."):
    raise ImportError("import this package as triplane.edge, not as a top-level package")
