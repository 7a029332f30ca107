"""The commands of `sparsekv`. Each has a file that parses its options, calls the library and prints the result."""
