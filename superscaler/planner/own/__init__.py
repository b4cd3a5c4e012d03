"""Plans whose stages differ."""
