"""The stores: what a training script imports."""
