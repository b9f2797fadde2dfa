"""The rules of a server."""
