"""Benchmarks of decode steps, of one layer or a whole model: synthetic data, clocks, and dense attention to compare."""
