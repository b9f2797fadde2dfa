"""The user's calls as generators of requests."""
