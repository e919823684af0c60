"""Predicted steps against measured ones."""
