"""Online: opening an index, the attention hook, one file per method that selects, decoding, recall."""
