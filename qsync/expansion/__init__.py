"""Lossless growth: a trained model becomes a larger one that computes the same, and goes on training.

Source of the method: LEMON (ICLR 2024, arXiv:2310.07999); what is ours is marked so. recipes.py says which
module reads and writes which space, families.py has the recipes that ship, derivation/ proposes others;
sizes.py and depth.py how large everything is and becomes. spaces.py says where the coordinates of a grown
space come from, maps.py makes tensors by it, tensors.py, layout.py and silencing.py work out which map every
tensor gets. model_map.py holds all maps of a model; telling.py prints it and growing.py builds by it, plan.py
is the record that does both, expanding.py plans and builds at once. verification.py compares; optimizers.py,
carrying.py and budgets.py take along what else is known of the small model; saving.py and reading.py keep it
all in folders.
"""
