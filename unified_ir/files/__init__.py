"""What a file is, byte by byte: container, manifest, digests, tensors. Numpy and protobuf only."""
