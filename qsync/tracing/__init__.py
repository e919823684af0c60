"""Tracing: a torch model becomes an operator graph."""
