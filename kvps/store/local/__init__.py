"""The ``local`` and ``device`` stores: one process, no servers."""
