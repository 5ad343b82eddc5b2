"""The phases of `make gpu`, which `__main__` runs."""
