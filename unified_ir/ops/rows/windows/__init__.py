"""Rows over windows and places of a plane."""
