"""`superscaler` and `python -m superscaler` are the command line."""

from __future__ import annotations

from superscaler import interrupt


def main() -> None:
    """Run the command line as this whole process."""
    interrupt.run(_main)


def _main() -> None:
    import gc
    import io
    import sys
    from contextlib import suppress

    from superscaler.cli.main import main

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without "é" is no reason to fail, and neither is a stream that cannot be reconfigured.
        with suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        main()
    finally:
        # Python would search all objects of torch for garbage before it ends, which takes seconds.
        gc.freeze()


if __name__ == "__main__":
    main()
