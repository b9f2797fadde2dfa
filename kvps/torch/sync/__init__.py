"""Parameters and gradients of a model in a store, for all front ends."""
