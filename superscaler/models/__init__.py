"""Models by name, from their configs with random weights, and models from a user's own file."""

from __future__ import annotations

from superscaler.models.build import BuiltModel, build, names

__all__ = ["BuiltModel", "build", "names"]
