"""What every plan must keep, and one step of it against the model: checks, the oracle, what differs where."""

from __future__ import annotations

from superscaler.verify.verify import certify, verify

__all__ = ["certify", "verify"]
