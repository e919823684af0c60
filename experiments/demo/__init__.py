"""The demo: two unequal ranks train, against every other way to run them."""
