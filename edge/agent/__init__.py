"""The agent of a node: what shall be served is fetched, verified, tried, switched to, reported."""
