"""Differential privacy with one device as the unit: clipping, noise, and what a run spends.

Two states of a run are neighbours if one device takes part in all its rounds with a zero update in
place of its own. Every mechanism here has the Renyi divergences of a Gaussian, alpha / (2 z^2) for
its noise multiplier z, so one number describes it (`accountant.GaussianEvent`). Noise is drawn from
the operating system's generator (`secret`), never from a plan's key.
"""
