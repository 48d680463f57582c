"""Verify signed metadata (TUF) away from the cloud: on nodes and on devices."""
