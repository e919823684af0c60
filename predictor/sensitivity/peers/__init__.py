"""Other people's indicators, to compare with."""
