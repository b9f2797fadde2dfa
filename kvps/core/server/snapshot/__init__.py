"""Snapshots of a server: capture and restore, and the orders to the disk."""
