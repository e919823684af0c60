"""Checkpoints that survive kills, full disks and other cards.

contents    what a checkpoint holds: its index, its verification, the checkpoints of a folder; no torch
state       model, optimizer and other objects as JSON with named tensors; random state
writer      `save`: stage, write and publish by rename
reader      `load`: onto any number of ranks
periodic    `Checkpoints`: every N steps, asynchronously, the newest K
"""
