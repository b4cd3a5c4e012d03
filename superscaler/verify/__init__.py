"""Verification: the checks that every plan must pass, and comparisons of its steps with those of the model."""

from superscaler.verify.run import certify, verify

__all__ = ["certify", "verify"]
