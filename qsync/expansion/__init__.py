"""Lossless growth: a trained model becomes a larger one that computes the same, and goes on training.

Source of the method: LEMON (ICLR 2024, arXiv:2310.07999); what is ours is marked so. recipes.py says which
module reads and writes which space, spaces.py where the coordinates of a grown space come from, maps.py makes
tensors by it, layout.py works out which map every tensor gets, growing.py builds, verification.py compares.
"""
