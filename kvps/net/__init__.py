"""The world, as thin as it can be: one loop, and the ways in which packets and values travel."""
