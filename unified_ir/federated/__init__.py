"""The mathematics of devices that learn together; it knows no network and no files of others.

`core` is what a device and the cloud share (numpy only): the round as a state machine, aggregation,
compression, a device's work. `algorithms` makes the graphs that devices run.
"""
