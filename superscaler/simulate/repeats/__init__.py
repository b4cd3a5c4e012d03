"""Loops: what is looked at, or done, once for all repetitions."""
