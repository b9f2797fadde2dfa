"""The copy of a seat on another server: the primary sends it, the standby takes it in."""
