"""What a model and a plan say about themselves: as data, in words, in pictures."""
