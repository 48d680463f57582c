"""Differential privacy with one device as the unit: clipping, noise, and what a run spends.

Two histories of a run are neighbours if they differ in one device, which in one of them sends zero
updates in all its rounds. A use of a device by a mechanism is described by a noise multiplier and
by what is known of the noise (`accountant.NoiseEvent`). Noise is drawn from the operating system's
generator (`secret`), never from a plan's key.
"""
