"""The training loop of a rank, its data, and the launch of all ranks."""
