"""Verification: the checks that every plan must pass, and its steps against those of the model."""

from superscaler.verify.run import certify, verify

__all__ = ["certify", "verify"]
