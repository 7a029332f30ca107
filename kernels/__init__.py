"""Attention over chosen runs and centroid lookup, each beside its plain-torch reference."""
