"""The agent of a node.

It fetches, verifies, tries, switches to and reports the desired versions.
"""
