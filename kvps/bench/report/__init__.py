"""Figures, tables, sweeps and plots of a benchmark."""
