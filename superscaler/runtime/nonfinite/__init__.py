"""Where numbers that are not finite come from: a failed step runs again, under a watch."""
