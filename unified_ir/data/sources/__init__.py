"""Sources of a pipeline: each describes a file, a folder or a query, and opens it within limits."""
