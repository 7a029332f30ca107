"""The online half: opening an index, sparse attention, one file per selection method, decoding, reports, tuning."""
