"""Evaluation: tasks with known answers, their metrics, and what a difference between two methods is worth."""
