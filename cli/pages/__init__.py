"""HTML pages and JSON files that commands write."""
