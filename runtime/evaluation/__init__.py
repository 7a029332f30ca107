"""Evaluation: answers by each method to the questions of tasks, and confidence intervals of their differences."""
