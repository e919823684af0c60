"""Levers, predicted and measured: `measured_levers`."""
