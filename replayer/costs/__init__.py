"""Prices: the time of every node of a lowered graph on a device class, one by one and in arrays."""
