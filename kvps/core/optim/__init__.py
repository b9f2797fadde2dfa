"""Optimizers on flat slices: hyper-parameters, update rules, sparse updates."""
