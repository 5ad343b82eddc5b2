"""Regions: groups of element-wise and reducing operators that one generated kernel computes."""
