"""Plans for a weak rank of little memory, in every way there is: `__main__`, `ranks`, `report`."""
