"""Rows that draw random numbers."""
