"""kvps as a guest in other systems, an annex: the rest of kvps reaches it through kvps.annexes."""
