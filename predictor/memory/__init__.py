"""Memory: when every tensor of a step lives, and the peak."""
