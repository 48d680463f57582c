"""Nodes, their desired documents, and rollouts that change these wave by wave.

`rollout` decides and does nothing else; `fleet` keeps what was decided in the database together
with the nodes' desired documents; `sessions` carries documents to nodes and reports back.
"""
