"""Matching queries to targets, and what their mistakes cost."""
