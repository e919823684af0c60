"""Running a model under a plan: the FX pass and the program that executes it."""
