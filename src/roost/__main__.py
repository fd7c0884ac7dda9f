"""`python -m roost` is the same as `roost`."""

from roost.cli.main import main

if __name__ == "__main__":
    main()
