"""Shared memory between processes of one host: segments, leases, and a transport that lends in
place of sending."""
