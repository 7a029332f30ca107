"""`python -m sparsekv.cli`: the command, for launchers that start a Python module."""

from sparsekv.cli.main import main

if __name__ == "__main__":
    main()
