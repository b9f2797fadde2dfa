"""The world, as thin as it can be: one loop, and two ways for packets to travel."""
