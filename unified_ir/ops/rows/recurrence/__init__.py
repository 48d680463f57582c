"""Rows that walk over a sequence of steps, and attention."""
