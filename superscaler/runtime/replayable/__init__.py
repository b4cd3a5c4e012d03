"""What a replay of a recorded step cannot do: its calls are found, and refused before anything runs."""
