"""Nodes, what they shall serve, and rollouts that change it wave by wave.

`rollout` decides and does nothing else; `fleet` keeps what was decided in the database together
with the nodes' desired documents; `sessions` carries documents to nodes and reports back.
"""
