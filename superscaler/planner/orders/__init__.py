"""Orders of the works of a pipeline: list scheduling, then branch and bound."""
