"""The update path: admission of pushes, sums, optimizer steps, norms of whole tensors."""
