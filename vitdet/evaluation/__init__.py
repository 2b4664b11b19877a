"""Metrics: COCO box AP and AR."""
