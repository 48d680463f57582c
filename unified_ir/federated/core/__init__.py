"""What device and cloud compute alike in a federated run, on numpy alone."""
