"""Kernels for clustering, centroid lookup and attention over chosen rows, each with its plain-torch reference."""
