"""Lossless growth: a trained model becomes a larger one that computes the same, and goes on training.

Source of the method: LEMON (ICLR 2024, arXiv:2310.07999); what is ours is marked so. recipes.py says which
module reads and writes which space, families.py has the recipes that ship, derivation/ proposes others;
sizes.py and depth.py how large everything is and becomes. spaces.py says where the coordinates of a grown
space come from, maps.py makes tensors by it, tensors.py, layout.py and silencing.py work out which map every
tensor gets. growing.py builds, verification.py compares; optimizers.py, carrying.py and budgets.py take along
what else is known of the small model; saving.py and reading.py keep it all in folders.
"""
