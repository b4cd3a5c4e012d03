"""Tests of each room of the package, in a folder of its name; what several share is in `tests/helpers`."""
