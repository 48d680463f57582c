"""The mathematics of a federated run that device and cloud share; it needs numpy only."""
