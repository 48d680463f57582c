"""Rows over sequences, optionals, strings and image files."""
