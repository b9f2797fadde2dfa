"""What ``kvps bench`` does: kvps and its peers push and pull the same arrays, in turns."""
