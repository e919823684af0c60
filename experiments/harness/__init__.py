"""What experiments share: emulated devices, paired timing, results."""
