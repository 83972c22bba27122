"""The `tunebench` backend of `torch.compile`."""
