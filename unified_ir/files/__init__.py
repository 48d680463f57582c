"""The file format: container, manifest, digests, tensors. It needs only numpy and protobuf."""
