"""Reports on models and plans: as data, in words, in pictures."""
