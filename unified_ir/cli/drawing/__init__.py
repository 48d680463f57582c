"""Pictures of graphs: an outline of scopes that fold, laid out in layers, as a page or an SVG."""
