"""The search for a plan: the best one in a space, and how far it can be from the best."""
