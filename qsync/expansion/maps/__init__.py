"""Maps: how every tensor of a model grows."""
