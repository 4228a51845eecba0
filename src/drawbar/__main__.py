"""`python -m drawbar`: the same program as `drawbar`."""

from drawbar.cli import main

if __name__ == "__main__":
    main()
