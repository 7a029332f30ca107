"""Kernels for clustering, centroid lookup and attention over chosen rows, each beside its plain-torch reference."""
