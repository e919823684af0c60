"""Apply a map: the grown model, its optimizer state, its schedule, and the check that nothing was lost."""
