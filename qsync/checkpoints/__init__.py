"""Checkpoints that survive kills, full disks and other cards.

contents         what a checkpoint holds: its index, its verification, the checkpoints of a folder; no torch
state            model and other objects as JSON with named tensors; random state
optimizer_state  an optimizer, or several, by names of parameters
writer           `save`: stage, write and publish by rename
reader           `load`: onto any number of ranks
periodic         `Checkpoints`: every N steps, asynchronously, the newest K
"""
