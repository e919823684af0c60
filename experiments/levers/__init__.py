"""Measure levers against their predictions: `measured_levers`."""
