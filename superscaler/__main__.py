"""`python -m superscaler` is the command line."""

from __future__ import annotations

from superscaler.cli.main import main

if __name__ == "__main__":
    main()
