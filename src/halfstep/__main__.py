"""`python -m halfstep`."""

from halfstep.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
