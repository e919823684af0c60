"""Operators that save less for backward."""
