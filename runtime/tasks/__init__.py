"""Tasks with known answers, which an evaluation generates or reads, and the metrics that score the answers."""
