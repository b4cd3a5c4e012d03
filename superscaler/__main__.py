"""`superscaler` and `python -m superscaler` are the command line."""

from __future__ import annotations

from superscaler import interrupt


def main() -> None:
    """Run the command line as this whole process."""
    interrupt.run(_main)


def _main() -> None:
    from superscaler.cli.main import main

    main()


if __name__ == "__main__":
    main()
