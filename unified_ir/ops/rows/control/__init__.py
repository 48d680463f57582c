"""Rows over regions: branches, loops, custom gradients and user-defined operators."""
