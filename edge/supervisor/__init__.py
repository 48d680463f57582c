"""The supervisor of a node: starts the inference server and the agent, and restarts them."""
