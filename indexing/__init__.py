"""Offline: capture of q, k and v from a model, clustering, one file per method that builds its tensors."""
