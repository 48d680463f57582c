"""The format of files: container, manifest, digests, tensors. Numpy and protobuf only."""
