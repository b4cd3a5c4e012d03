"""Options of commands: their declaration, their values in files, and functions that become commands."""
