"""The wire: schemas, generated code, error families, the status table."""

if not __name__.startswith("triplane."):
    raise ImportError("import this package as triplane.proto, not as a top-level package")
