"""Plans against other ways to choose precisions."""
