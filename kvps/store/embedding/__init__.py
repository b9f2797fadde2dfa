"""Embedding tables of a store: rows by 64-bit ids."""
