"""Benchmarks of decode steps of one layer or a whole model, with synthetic data, compared with dense attention."""
