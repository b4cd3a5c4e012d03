"""Programs of one step for batches of several shapes."""
