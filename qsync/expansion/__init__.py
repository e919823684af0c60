"""Lossless growth: a trained model made wider and deeper, and trained on.

The method is LEMON's (Wang et al., "LEMON: Lossless model expansion", ICLR 2024, arXiv:2310.07999).
"""
