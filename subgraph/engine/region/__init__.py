"""Regions on any device that plans: the strategies that find a plan for a call, in order."""
