"""Draw plans and predictions: precision map, timeline, memory of a step, trade between time and variance."""
