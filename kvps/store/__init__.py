"""What a training script imports: the stores, and the process's place in the cluster."""
