"""The supervisor of a node: starts serving and agent, restarts what ends, and does nothing else."""
