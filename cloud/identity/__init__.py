"""Identities of the cloud's callers: authority, tokens, principals, rights, audit log."""
