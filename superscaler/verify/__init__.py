"""Verification: the checks that every plan must pass, and comparisons of its steps with those of the model."""

from superscaler.verify.run import compare_with_eager, verify

__all__ = ["compare_with_eager", "verify"]
