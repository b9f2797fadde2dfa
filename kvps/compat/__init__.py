"""Drop-in names of other systems, an annex: nothing else in kvps imports it."""
