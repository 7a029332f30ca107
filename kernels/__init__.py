"""Kernels of builds and decode steps, with their definitions in plain torch.

There are kernels for clustering, for the scores of clusters, codes and posting lists, for attention, for products with
quantised weights, and for sums over GPUs. The folder `common` also routes a model's attention to a caller's function.
"""
