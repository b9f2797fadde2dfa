"""Embedding tables: rows that are made by pushes, their index, memory and admission."""
