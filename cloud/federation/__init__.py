"""Federated runs: the tasks of devices, their updates, and the results.

Every run is a journal of events that is folded by `unified_ir.federated.core.rules`; this package
does the effects. It reads state and update files, but never a model file and never a graph: those
are opened by children.
"""
