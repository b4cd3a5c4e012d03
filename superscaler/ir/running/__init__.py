"""Programs that run: which ends of communication meet, and the machine that steps all codes."""
