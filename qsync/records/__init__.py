"""Records: what is measured, planned and predicted, read and written as JSON. No torch."""
