"""kvps as a guest in other systems, an annex: nothing else in kvps imports it."""
