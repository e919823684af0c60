"""Search over levers other than precision."""
