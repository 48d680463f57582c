"""The mathematics of federated learning, without network code.

`core` is what a device and the cloud share (numpy only): the round as a state machine, aggregation,
compression, a device's work. `algorithms` builds the graphs that devices run.
"""
