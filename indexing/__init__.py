"""Offline half: capture queries, keys and values of a prefill, and build each method's index from them."""
