"""Profiling: the time of every operator, cast, link and loader on this device."""
