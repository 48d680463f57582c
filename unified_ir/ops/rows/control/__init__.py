"""Rows over regions: branches, loops, gradients and operators of one's own."""
