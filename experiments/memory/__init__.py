"""Predicted bytes against measured ones."""
