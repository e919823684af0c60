"""Function-preserving expansion: grow a trained model into a larger one.

Source of the method: LEMON (ICLR 2024, arXiv:2310.07999). Each folder imports only folders above it:

    recipe/      spaces that modules read and write, and their sizes before and after
    maps/        the map of every tensor, axis by axis
    apply/       the grown model, its optimizer state and schedule, and the check of the function
    plan/        plan an expansion: the map of a whole model
    io/          save and load expanded models
    transfer/    carry sensitivities and profiles to the grown model, predict its memory
    derivation/  propose a recipe from one run of a model, or plan a growth from it
"""
