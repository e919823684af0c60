"""Levers, predicted and measured.

`measured_levers`  the experiment
`lever_ranks`      one of its ranks
"""
