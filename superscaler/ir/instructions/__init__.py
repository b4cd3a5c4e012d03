"""Instructions: the roles of their fields, the facts that readers ask of any of them, and their classes."""
