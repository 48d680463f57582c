"""Differential privacy with one device as the unit: clipping, noise, and what a run spends.

Two histories of a run are neighbours if they differ in one device, which in one of them contributes
zeros in all its rounds: to the sums of updates and to those of clipping bits. This is the zero-out
adjacency of Kairouz et al. 2021 (arXiv 2103.00039), with the sensitivity of add/remove adjacency.
The number of devices in a round is the same in both, so it is public and a mean may divide by it.
Replacing a device by another is two such steps: a distance of 2 norms instead of 1, which is not
what is stated as epsilon. A use of a device by a mechanism is described by a noise multiplier and
by what is known of the noise (`accountant.NoiseEvent`). Noise is drawn from the operating system's
generator (`secret`), never from a plan's key.
"""
