"""The search for a plan: the best one in a space, and how far it can be from the best."""

# The jobs of a search in a second process.
WORK = "superscaler.planner.whole.programs:Work"
