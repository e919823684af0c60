"""Sensitivity: the gradient variance that a precision adds, by several indicators."""
