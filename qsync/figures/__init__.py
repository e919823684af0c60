"""Draw plans and predictions: precision map, timeline, memory of a step, time against variance."""
