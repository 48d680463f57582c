"""Rows that compute: elementwise, reductions, products, normalization, losses."""
