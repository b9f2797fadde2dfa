"""``kvps bench`` at length: sweeps, plots, networks of a set rate, and the peers MXNet and Ray."""
