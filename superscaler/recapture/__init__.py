"""A captured step captured again: in eval mode, and for batches of other shapes."""
