"""`superscaler` and `python -m superscaler` are the command line."""

from __future__ import annotations

from superscaler import interrupt


def main() -> None:
    """Run the command line as this whole process."""
    interrupt.run(_main)


def _main() -> None:
    import io
    import sys
    from contextlib import suppress

    from superscaler.cli.main import main

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that has no "é" is no reason to fail, and a stream that cannot be set up anew is none, either.
        with suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")
    main()


if __name__ == "__main__":
    main()
