"""The process group "kvps" of torch.distributed."""
