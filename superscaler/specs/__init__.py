"""User input in text: options, and functions in files of their own."""
