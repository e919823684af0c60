"""Models and data that experiments train."""
