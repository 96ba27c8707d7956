"""Checks of operands at run time: values out of range, and the operator Required."""
