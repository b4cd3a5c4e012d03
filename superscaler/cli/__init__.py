"""The command line: one file per verb. Nothing here imports torch before a command runs."""
