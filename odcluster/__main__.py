"""`odcluster` and `python -m odcluster`."""

from odcluster.cli import main

if __name__ == "__main__":
    main()
