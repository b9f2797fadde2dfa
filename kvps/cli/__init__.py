"""The commands: flags and variables in, exit codes out."""
