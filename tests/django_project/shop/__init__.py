"""The only app of the project."""
