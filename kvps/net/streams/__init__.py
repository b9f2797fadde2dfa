"""Streams: one plain TCP connection for the packets of a worker and a server of two hosts."""
