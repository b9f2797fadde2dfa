"""Training by local steps: workers train alone for many steps, and the servers merge what they
have learned."""
