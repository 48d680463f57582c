"""Rows that arrange, pick or write elements."""
