"""Rerun every experiment behind README and docs, and compare papers' figures with ours.

commands   the experiments and their commands
papers     figures that the papers state, beside ours
"""
