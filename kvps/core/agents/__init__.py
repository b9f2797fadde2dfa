"""Members that hold no values: the supervisor of a command, and the status client."""
