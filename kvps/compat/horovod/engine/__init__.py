"""The engine of the drop-in names: a thread that negotiates, and the transfers that follow."""
