"""Predict sensitivities, profiles and memory of the grown model from the small one's.

costs_and_sensitivity  carry sensitivities and profiles over
scaling                the growth of gradients and rounding errors
memory_check           predict the memory of a training step
"""
