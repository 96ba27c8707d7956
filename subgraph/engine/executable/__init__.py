"""Executable plans of the CPU: plans as argument layouts, and these bound to memory.

Read `argument_layout` first, then `executable_plan`. `symbolic_plan` serves all sizes of some
dimensions, and `stored_program` exported models.
"""
