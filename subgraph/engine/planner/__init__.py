"""The planner: from a graph with sizes to steps over placed memory."""
