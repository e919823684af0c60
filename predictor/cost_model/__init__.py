"""Cost model: what operators cost that were not measured."""
