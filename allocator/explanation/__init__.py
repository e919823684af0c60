"""Explanation of a plan: certificate, reasons, prices, and what is unsupported."""
