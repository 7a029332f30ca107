"""Timing one decode step of one layer: data that looks like a model's, clocks, and dense attention to compare with."""
