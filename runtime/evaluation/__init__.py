"""Evaluation: tasks with known answers, their metrics, and confidence intervals of differences between methods."""
