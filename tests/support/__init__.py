"""Helpers of several test files: reference arithmetic, tiny models, small indices."""
