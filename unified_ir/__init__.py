"""The training core: IR, autodiff, engines, converter, and the runtime that needs none of them."""

if not __name__.startswith("triplane."):
    raise ImportError("import this package as triplane.unified_ir, not as a top-level package")
