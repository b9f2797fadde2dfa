"""Host aggregation: pushes and pulls of the workers of one host, merged."""
