"""Measurements against other libraries that anyone can repeat."""
